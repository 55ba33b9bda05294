"""scripts.bench.training: what it counts, how it sorts kernels, that failures are rows, and its files."""

import json
import re
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model.config import LlamaConfig, flops_per_token, parameter_count
from model.llama import Llama
from scripts.bench import training as bench
from scripts.bench import training_peers
from scripts.bench import training_step as step
from scripts.bench import training_tables as tables
from scripts.bench.training_tables import ATTENTION, OTHER_KERNELS, PRODUCTS, Row

SHAPE = ["--model", "llama_debug", "--contexts", "32", "--tokens-per-micro-batch", "64"]
SMALL = ["--device", "cpu", *SHAPE, "--steps", "2", "--warm-up", "1", "--profile-steps", "1"]
CONFIG = LlamaConfig(
    vocab_size=61, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=40, qk_norm=False
)


def job_of(contestant, *options):
    return bench.job_of(contestant, 32, bench.parse_arguments([*SMALL, *options]))


def row_of(contestant, context=32, step_ms=10.0, **fields):
    speed = step.speed_of([step_ms], tokens=64, flops=1e9, peak=None)
    return Row(
        contestant,
        context,
        2,
        **speed | {"class_ms": {ATTENTION: 4.0, PRODUCTS: 3.0, OTHER_KERNELS: 1.0}} | fields,
    )


# --- Counting -----------------------------------------------------------------------------------------------


def test_speed_and_mfu_by_hand():
    """65,536 tokens in 250 ms are 262,144 a second; at 2 GFLOP a token 524.288 of 1048.576 TFLOP/s."""
    speed = step.speed_of([240.0, 250.0, 250.0, 250.0, 290.0], 65536, flops=2e9, peak=1048.576)
    assert speed["step_ms"] == 250
    assert speed["tokens_per_second"] == pytest.approx(262_144)
    assert speed["mfu"] == pytest.approx(0.5)
    assert (speed["p10_ms"], speed["p90_ms"]) == pytest.approx((244, 274))
    assert step.speed_of([1.0], 64, flops=2e9, peak=None)["mfu"] is None


def test_shares_are_of_kernel_time_and_busy_of_the_step():
    found = tables.shares(row_of("fpa", step_ms=10.0))
    assert found == {ATTENTION: 0.5, PRODUCTS: 0.375, OTHER_KERNELS: 0.125, "busy": 0.8}
    assert set(tables.shares(Row("fpa", 32, 2, reason="broken")).values()) == {None}


def test_speedups_are_over_rows_of_the_same_context():
    rows = [row_of("fpa-cudnn", step_ms=20.0), row_of("sagebwd", step_ms=10.0), row_of("sagebwd", context=64)]
    rows.append(Row("fpa-flash", 32, 2, reason="broken"))
    cudnn, ours, alone, broken = bench.add_ratios(rows)
    assert cudnn.speedup == {"fpa-cudnn": 1}
    assert ours.speedup == {"fpa-cudnn": 2}
    assert alone.speedup == broken.speedup == {}


def test_a_job_gives_the_trainer_its_shape():
    options = ["--model", "llama_debug", "--contexts", "256", "--tokens-per-micro-batch", "1024"]
    options += ["--device", "cpu", "--accumulation", "3", "--set", "model.qk_norm=false"]
    settings = step.settings_of(bench.job_of("fpa-flash", 256, bench.parse_arguments(options)))
    assert (settings.context, settings.hardware.micro_batch, settings.tps.tokens_per_step) == (256, 4, 3072)
    assert settings.model.max_context == 256  # the file has 128
    assert settings.attention.sdpa == "flash"
    assert not settings.model.qk_norm
    assert settings.hardware.dtype == "float32"


def test_on_a_gpu_settings_are_the_trainer_s_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = bench.parse_arguments([])
    assert [arguments.contexts, arguments.attention] == [
        [4096, 16384],
        ["fpa-cudnn", "fpa-flash", "fpa-fa4", "sagebwd"],
    ]
    settings = step.settings_of(bench.job_of("sagebwd", 16384, arguments))
    assert (settings.hardware.dtype, settings.hardware.compile) == ("bfloat16", True)
    assert (settings.hardware.micro_batch, settings.model.max_context) == (4, 16384)
    plain = bench.job_of("sagebwd", 4096, bench.parse_arguments(["--no-compile"]))
    assert not step.settings_of(plain).hardware.compile


# --- Kernels ------------------------------------------------------------------------------------------------

KERNELS = {
    ATTENTION: [
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x64x64_4x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 64>(...)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<...>)",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    PRODUCTS: [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_tn_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>",
        "aten::mm",
        "aten::addmm",
    ],
    OTHER_KERNELS: [
        "triton_poi_fused__scaled_dot_product_cudnn_attention_cat_mul_transpose_3",
        "triton_red_fused__to_copy_mm_rms_norm_backward_7",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "Memcpy DtoH (Device -> Pinned)",
        "aten::mul",
    ],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names]
)
def test_kernels_of_others_by_name(kind, name):
    assert step.classify(name) == kind


def test_all_our_kernels_are_attention():
    sources = [*(bench.ROOT / "sagebwd").rglob("*.py"), *(bench.ROOT / "sagebwd").rglob("*.cu")]
    names = []
    for source in sources:
        text = source.read_text()
        names += re.findall(r"@triton\.jit[^\n]*\ndef (_\w+_kernel)\(", text)
        names += re.findall(
            r"__global__ void[^;{]*?(\w+)\(\s*(?:const )?(?:Source|Arguments|float|u8)\b", text
        )
    assert {"_forward_kernel", "_dq_kernel", "forward_kernel", "dk_dv_kernel"} <= set(names)
    assert {name: step.classify(name) for name in names} == dict.fromkeys(names, ATTENTION)


def test_times_add_up_by_class():
    times = {"nvjet_a": 2.0, "nvjet_b": 1.0, "forward_kernel": 4.0} | {f"aten::x{n}": 0.1 for n in range(30)}
    found = step.summarise(times)
    assert found["class_ms"] == pytest.approx({ATTENTION: 4, PRODUCTS: 3, OTHER_KERNELS: 3})
    assert list(found["kernels"])[:3] == ["forward_kernel", "nvjet_a", "nvjet_b"]
    assert len(found["kernels"]) == step.KERNELS_KEPT


# --- Baselines ----------------------------------------------------------------------------------------------


@pytest.fixture
def batch():
    return torch.randint(61, (2, 2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["hf", "hf-causal"])
def test_hugging_face_s_llama_is_ours_without_qk_norm(name, batch):
    ours, theirs = Llama(CONFIG, F.scaled_dot_product_attention), training_peers.BASELINES[name](CONFIG)
    missing, extra = theirs.load_state_dict(
        {f"llama.model.{key}": value for key, value in ours.state_dict().items()}, strict=False
    )
    assert (missing, extra) == (["llama.lm_head.weight"], [])  # tied
    torch.testing.assert_close(theirs(*batch), ours(*batch))


def test_nanogpt_is_causal_and_counts_as_many_flops(batch):
    gpt = training_peers.NanoGPT(CONFIG)
    weights = sum(p.numel() for p in gpt.parameters() if p.dim() > 1) - gpt.positions.weight.numel()
    gains = (2 * CONFIG.n_layers + 1) * CONFIG.d_model
    assert weights == parameter_count(CONFIG) - gains
    inputs, targets = batch
    early = torch.full_like(targets, -100)
    early[:, :8] = targets[:, :8]
    changed = torch.cat([inputs[:, :8], 60 - inputs[:, 8:]], dim=1)
    torch.testing.assert_close(gpt(changed, early), gpt(inputs, early))
    assert gpt(changed, targets) != gpt(inputs, targets)


# --- One contestant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("contestant", ["fpa", "hf"])
def test_a_contestant_is_measured_in_the_trainer_s_step(contestant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's
        measured = step.measure(job_of(contestant, "--loader", "--accumulation", "2"))
    row = Row(contestant, 32, 2, **measured)
    assert 5 < row.loss < 7  # ln(320) is 5.8
    assert row.tokens_per_second == pytest.approx(128 / row.step_ms * 1e3)
    assert all(spent > 0 for spent in row.class_ms.values())
    assert "aten::mm" in row.kernels
    assert row.first_step_s > 0
    for overhead in (row.loader_ms, row.loader_step_ms, row.log_ms):
        assert (overhead is None) if contestant == "hf" else (overhead > 0)


def test_mfu_is_the_trainer_s(monkeypatch):
    job = job_of("fpa", "--set", "hardware.peak_tflops=0.01")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = step.measure(job)
    flops = flops_per_token(step.settings_of(job).model, 32)
    assert measured["mfu"] == pytest.approx(measured["tokens_per_second"] * flops / 0.01e12)


@pytest.mark.parametrize("contestant", ["fpa", "fpa-deterministic"])
def test_determinism_is_settled_before_the_trainer_exists(contestant, monkeypatch):
    """As train.py does it; cuBLAS reads its part when it starts."""
    asked = []

    def no_trainer(*_):
        raise InterruptedError

    monkeypatch.setattr(step, "make_deterministic", asked.append)
    monkeypatch.setattr(step, "BenchTrainer", no_trainer)
    with pytest.raises(InterruptedError):
        step.measure(job_of(contestant))
    assert asked == [contestant == "fpa-deterministic"]


@pytest.mark.parametrize("name", bench.ATTENTIONS)
def test_every_attention_has_settings_that_go_together(name):
    step.settings_of(job_of(name))


def fail_with(monkeypatch, failing):
    """Stands in for the process of a contestant."""
    monkeypatch.setattr(bench.subprocess, "run", failing)


def test_a_process_that_dies_without_a_word_is_a_row(monkeypatch):
    def killed(command, stdout, **_):
        stdout.write("\n".join(f"line {n}" for n in range(40)))
        return subprocess.CompletedProcess(command, -9)

    fail_with(monkeypatch, killed)
    row = bench.run_process(job_of("fpa"), limit=5)
    assert row.reason == "its process ended with code -9"
    assert row.log == [f"line {n}" for n in range(25, 40)]


def test_a_process_that_hangs_is_a_row(monkeypatch):
    def hanging(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    fail_with(monkeypatch, hanging)
    assert bench.run_process(job_of("fpa"), limit=5).reason == "it took longer than --limit 5 seconds"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "OutOfMemoryError: CUDA out of memory. Tried"),
        (AssertionError(), "AssertionError: no message"),
    ],
)
def test_an_error_is_told_in_one_line(error, reason, monkeypatch, tmp_path, capsys):
    def broken(_):
        raise error

    monkeypatch.setattr(step, "measure", broken)
    bench.write_json(tmp_path / "job.json", bench.asdict(job_of("fpa")))
    step.run_job(str(tmp_path / "job.json"))
    assert json.loads((tmp_path / "answer.json").read_text()) == {"reason": reason}
    assert "Traceback" in capsys.readouterr().err


# --- The command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder, the JSON and the Markdown of the whole command; FlashAttention-2 fails on a CPU."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    contestants = ["--attention", "fpa-flash", "sagebwd", "--baselines", "nanogpt"]
    bench.main([*SMALL, *contestants, "--loader", "--out", str(folder / "v1.2")])
    return folder, json.loads((folder / "v1.2.json").read_text()), (folder / "v1.2.md").read_text()


def test_rows_are_measured_or_say_why_not(run):
    flash, ours, nano = run[1]["rows"]
    assert [row["contestant"] for row in (flash, ours, nano)] == ["fpa-flash", "sagebwd", "nanogpt"]
    assert flash["reason"].startswith("TrainingError: attention.sdpa=flash cannot run on cpu")
    assert flash["log"][-1].endswith("or null for the fastest available")
    assert flash["step_ms"] is None
    for row in (ours, nano):
        assert row["reason"] is None
        assert row["p10_ms"] <= row["step_ms"] <= row["p90_ms"]
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["step_ms"])
        assert row["class_ms"].keys() == {ATTENTION, PRODUCTS, OTHER_KERNELS}
    assert ours["loader_ms"] > 0
    assert nano["loader_ms"] is None


def test_json_says_how_to_measure_it_again(run):
    report = run[1]
    assert report["command"].startswith("python -m scripts.bench.training --device cpu --model llama_debug ")
    assert report["versions"]["torch"] == torch.__version__
    assert report["hardware"]["name"] == "cpu"
    assert report["settings"]["steps"] == 2
    assert report["measured"] == "3 of 3"
    assert {"date", "commit"} <= report.keys()


def test_markdown_has_a_line_for_each_contestant(run):
    _, report, text = run
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[0].startswith("| context 32, micro-batch 2 | tokens/s |")
    assert table[2].startswith("| fpa-flash ")
    assert "failed" in table[2]
    assert f" {report['rows'][1]['tokens_per_second']:,.0f} " in table[3]
    assert "- fpa-flash, context 32: TrainingError: attention.sdpa=flash cannot run" in text


def test_files_are_written_and_nothing_else(run):
    folder = run[0]
    assert sorted(path.name for path in folder.iterdir()) == ["v1.2.json", "v1.2.md", "v1.2.png"]
    assert (folder / "v1.2.png").read_bytes().startswith(b"\x89PNG")


def test_draw_writes_the_same_tables_and_picture_from_the_json(run, tmp_path):
    folder, _, text = run
    bench.main(["--draw", str(folder / "v1.2.json"), "--out", str(tmp_path / "v")])
    assert (tmp_path / "v.md").read_text() == text
    assert (tmp_path / "v.png").read_bytes() == (folder / "v1.2.png").read_bytes()


def test_an_interrupt_keeps_what_is_done(monkeypatch, tmp_path, capsys):
    done = [row_of("fpa", peak_memory_gib=1.5, first_step_s=3.0, kernels={"a": 1.0})]

    def process(job, limit):
        if not done:
            raise KeyboardInterrupt
        return done.pop()

    monkeypatch.setattr(bench, "run_process", process)
    with pytest.raises(SystemExit) as stop:
        bench.main([*SMALL, "--attention", "fpa", "sagebwd", "--out", str(tmp_path / "bench")])
    assert stop.value.code == 130
    report = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    assert report["measured"] == "1 of 5"
    assert [row["contestant"] for row in report["rows"]] == ["fpa"]
    assert "| fpa " in capsys.readouterr().out
    assert (tmp_path / "bench.png").exists()


def test_files_hold_nothing_but_failures(tmp_path):
    rows = [Row("fpa", 32, 2, reason="broken"), replace(row_of("hf", context=64), loss=float("nan"))]
    arguments = bench.parse_arguments(SMALL)
    result = bench.describe_run(bench.PROGRAM, [], arguments, ()) | {"measured": "2 of 2"}
    bench.write_tables(tmp_path / "bench", result, rows, tables.to_markdown(result, rows))
    tables.draw(rows, tmp_path / "bench.png", result)
    stored = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert stored[1]["loss"] is None
    assert "- fpa, context 32: broken" in (tmp_path / "bench.md").read_text()
    assert Path(tmp_path / "bench.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--device", "cpu", "--contexts", "48", "--tokens-per-micro-batch", "64"],
            "not a multiple of context 48; use 96",
        ),
        (["--device", "cpu", "--attention", "--baselines"], "nothing to measure"),
        (["--device", "cpu", "--attention", "best"], "invalid choice: 'best'"),
        (["--device", "cpu", "--steps", "0"], "'0' is not a positive whole number"),
    ],
)
def test_refuses_bad_options(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.parse_arguments(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys):
    with pytest.raises(SystemExit):
        bench.main([])
    assert "torch sees no GPU" in capsys.readouterr().err
