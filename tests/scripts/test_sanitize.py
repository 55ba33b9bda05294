"""scripts/sanitize.py, which needs a GPU to do more; its cases run in Triton's interpreter."""

import pytest
import torch

from scripts import sanitize

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter, which uses NumPy
    pytest.mark.filterwarnings("ignore:.* runs the triton kernels, slower:UserWarning"),
]


def test_sanitizer_runs_every_tool_on_every_case_by_default():
    arguments = sanitize.parse_arguments([])
    assert arguments.tools == ["memcheck", "racecheck"]
    assert arguments.cases == [*sanitize.CASES]
    assert arguments.case is None
    arguments = sanitize.parse_arguments(["--tools", "memcheck", "--cases", "packed", "smooth_q"])
    assert (arguments.tools, arguments.cases) == (["memcheck"], ["packed", "smooth_q"])
    assert sanitize.parse_arguments(["--case", "forward"]).case == "forward"
    assert arguments.kernels is None
    assert sanitize.parse_arguments(["--kernels", "ampere"]).kernels == "ampere"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tools", "initcheck"], "argument --tools: invalid choice: 'initcheck'"),
        (["--cases"], "argument --cases: expected at least one argument"),
        (["--case", "backwards"], "argument --case: invalid choice: 'backwards'"),
    ],
)
def test_sanitizer_refuses_bad_options(options, message, capsys):
    with pytest.raises(SystemExit):
        sanitize.parse_arguments(options)
    assert message in capsys.readouterr().err


def test_sanitizer_needs_a_gpu_and_its_tool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU; run this where there is one"):
        sanitize.main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="compute-sanitizer is not on PATH; it comes with the CUDA toolkit"):
        sanitize.main([])


@pytest.mark.parametrize(
    ("tool", "output", "errors"),
    [
        ("memcheck", "========= COMPUTE-SANITIZER\nbackward finished\n========= ERROR SUMMARY: 0 errors", 0),
        ("memcheck", "backward finished\n========= ERROR SUMMARY: 1 error", 1),
        (
            "racecheck",
            "backward finished\n========= RACECHECK SUMMARY: 7 hazards displayed (5 errors, 2 warnings)",
            5,
        ),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", None),
        ("memcheck", "backward finished", None),
        ("memcheck", "", None),
    ],
)
def test_sanitizer_counts_errors_and_notices_what_did_not_finish(tool, output, errors):
    assert sanitize.count_errors(tool, "backward", output) == errors


def test_sanitizer_watches_every_kernel():
    assert sanitize.kernel_names() == [
        "_block_sum_kernel",
        "_dk_dv_kernel",
        "_dq_kernel",
        "_forward_kernel",
        "_mean_kernel",
        "_quantize_grad_kernel",
        "_quantize_kernel",
        "backward_64_keys_dq_warps_kernel",
        "backward_64_keys_kernel",
        "backward_dq_warps_kernel",
        "backward_kernel",
        "dk_dv_kernel",
        "dq_kernel",
        "dq_tile_scales_kernel",
        "finish_dq_kernel",
        "forward_kernel",
        "pack_grad_kernel",
        "pack_k_columns_kernel",
        "pack_kv_int8_kernel",
        "pack_kv_kernel",
        "pack_q_kernel",
        "token_mean_kernel",
        "token_sum_kernel",
    ]


@pytest.mark.parametrize("case", sanitize.CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cases_of_the_sanitizer_run(case, device, monkeypatch):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU at hand kernels are compiled, not interpreted")
    if device == "cpu" and sanitize.CASES[case].config.dp_fp16_accumulation:
        pytest.skip("the Triton kernels do not run it")
    monkeypatch.setattr(sanitize, "DEVICE", device)
    sanitize.run_case(sanitize.CASES[case])
