"""scripts/sanitize.py, which needs a GPU to do more; its cases run in Triton's interpreter."""

import pytest
import torch

from scripts import sanitize

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter, which uses NumPy
    pytest.mark.filterwarnings("ignore:.* runs the triton kernels, slower:UserWarning"),
]


def test_sanitizer_counts_errors_and_notices_what_did_not_finish():
    done, hazards = "backward finished\n=========", "hazards displayed"
    for tool, output, errors in (
        ("memcheck", f"========= COMPUTE-SANITIZER\n{done} ERROR SUMMARY: 0 errors", 0),
        ("memcheck", f"{done} ERROR SUMMARY: 1 error", 1),
        ("racecheck", f"{done} RACECHECK SUMMARY: 7 {hazards} (5 errors, 2 warnings)", 5),
        ("racecheck", f"========= RACECHECK SUMMARY: 0 {hazards} (0 errors, 0 warnings)", None),
        ("memcheck", "backward finished", None),
        ("memcheck", "", None),
    ):
        assert sanitize.count_errors(tool, "backward", output) == errors, output


def test_sanitizer_watches_the_kernels_of_every_set():
    names = sanitize.kernel_names()
    assert {"_forward_kernel", "_quantize_kernel", "backward_64_keys_kernel", "dk_dv_kernel"} <= {*names}
    assert not [name for name in names if not name.endswith("_kernel")]


@pytest.mark.parametrize("case", ["forward", "wide_smooth_v"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU at hand kernels are compiled")
def test_cases_run_in_the_interpreter(case, monkeypatch):
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    sanitize.run_case(sanitize.CASES[case])


@pytest.mark.gpu
@pytest.mark.parametrize("case", sanitize.CASES)
def test_cases_run_on_a_gpu(case):
    sanitize.run_case(sanitize.CASES[case])
