"""From a run that was trained here to its layers' errors, RMS and Table 2."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import model.huggingface
import sagebwd.reference
from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import exact_attention
from scripts.output import read_json
from scripts.paper import layers, trained_runs
from scripts.paper.layers import VARIANTS
from tests.inputs import largest_logit
from trainer.run_directory import RunDirectory


def test_from_a_run_to_its_numbers(train_here, tmp_path, capsys, monkeypatch):
    shape = ("model.n_heads=4", "model.n_kv_heads=2", "context=37", "hardware.micro_batch=2")
    trainer = train_here(
        tmp_path / "run", "steps=3", *shape, "tps.tokens_per_step=148", "tps.divide_by=1",
        "hardware.dtype=bfloat16", "eval_every=99", "sample_tokens=0", "probe.every=0",
        "checkpoint_every=2", "milestone_every=2", "keep_checkpoints=1",
    )  # fmt: skip
    captured = remember_captured(monkeypatch)
    out = tmp_path / "out" / "layers"
    layers.main([str(tmp_path / "run"), "--out", str(out), "--sequences", "2", "--device", "cpu"])
    printed = capsys.readouterr().out
    result = read_json(tmp_path / "out" / "layers.json")

    origin = result["runs"]["run"]
    assert (origin["step"], origin["tokens"], origin["tokens_per_step"]) == (3, 444, 148)
    assert (origin["attention"], origin["qk_norm"]) == ("fpa", True)
    assert origin["text"] == trainer.corpus.manifest.fingerprint
    check_validation_text(trainer, tmp_path / "run", captured[0].v)
    assert [(row["run"], row["layer"]) for row in result["rows"]] == [("run", 0), ("run", 1)]
    for row in result["rows"]:
        check_row(row, captured[row["layer"]], sequences_per_step=4)

    worst = max(result["rows"], key=lambda row: row["errors"]["paper"]["dq_l2"])
    table = result["table2"]["run"]
    assert table["layer"] == worst["layer"]
    for name in ("o", "dq", "dk", "dv"):
        found = [worst["errors"]["paper"][f"{name}_{kind}"] for kind in ("cos", "l2")]
        assert table["paper"][name] == pytest.approx(found, rel=1e-3)
    text = (tmp_path / "out" / "layers.md").read_text()
    assert text in printed
    for part in (
        "0.9664 / 0.2579",
        f"run, layer {worst['layer']}",
        "1.0e-07",
        "each sequence's own mean loss",
    ):
        assert part in text
    pictures = sorted(file.name for file in (tmp_path / "out").glob("*.png"))
    assert pictures == ["layers.png", "layers_smoothing.png"]
    assert result["runs"]["run"]["sequences_per_step"] == 4
    check_weights_of_a_step(tmp_path / "run")
    check_refusals(tmp_path)


def remember_captured(monkeypatch):
    """{layer: what its attention took}, filled as the run is measured."""
    found, real = {}, layers.capture_run

    def remembering(*arguments):
        found.update(real(*arguments))
        return found

    monkeypatch.setattr(layers, "capture_run", remembering)
    return found


def check_validation_text(trainer, run, v):
    """The values of the first layer are those of the first two validation sequences."""
    llama = model.huggingface.load(run / "weights", scaled_dot_product_attention)
    tokens = torch.from_numpy(trainer.corpus.val.window(0, 74).astype("int64")).view(2, 37)
    block = llama.layers[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        values = block.self_attn.v_proj(block.input_layernorm(llama.embed(tokens)))
    assert torch.equal(v, values.view(2, 37, 2, -1).transpose(1, 2))


def check_weights_of_a_step(path):
    """The last checkpoint has the finished weights."""
    last, end = (trained_runs.open_run("run", RunDirectory(path), step) for step in (3, None))
    assert trained_runs.describe_trained(last) == trained_runs.describe_trained(end)
    left, right = (trained_runs.load_model(run, scaled_dot_product_attention) for run in (last, end))
    assert all(torch.equal(x, y) for x, y in zip(left.parameters(), right.parameters(), strict=True))


def check_row(row, captured, sequences_per_step):
    """What was measured of a layer, from what its attention took."""
    layer = captured.q, captured.k, captured.v, captured.grad_out
    wanted = exact_attention(*layer, is_causal=True, matrices=True)
    for variant, config in VARIANTS.items():
        sage = sagebwd.reference.attention(*layer, is_causal=True, enable_gqa=True, config=config)
        found = row["errors"][variant]
        for name, field in (("o", "out"), ("dq", "dq"), ("dk", "dk"), ("dv", "dv")):
            actual, exact = getattr(sage, field), getattr(wanted, field)
            assert found[f"{name}_cos"] == pytest.approx(cosine_similarity(actual, exact), abs=1e-5)
            assert found[f"{name}_l2"] == pytest.approx(relative_l2(actual, exact), rel=1e-3)
    p_rms, dp_rms, ds_rms = (x.square().mean().sqrt().item() for x in (wanted.p, wanted.dp, wanted.ds))
    expected = {
        "p_rms": p_rms, "dp_rms": dp_rms, "ds_rms": ds_rms,
        "dp_rms_in_step": dp_rms / sequences_per_step, "ds_rms_in_step": ds_rms / sequences_per_step,
        "largest_logit": largest_logit(captured.q, captured.k),
    }  # fmt: skip
    for name, value in expected.items():
        assert row["statistics"][name] == pytest.approx(value, rel=1e-4), name
    dq_errors = {errors["dq_l2"] for errors in row["errors"].values()}
    assert len(dq_errors) == len(VARIANTS) == 4  # all different


def check_refusals(folder):
    """Before anything is measured, with what is wrong and how to fix it."""
    run = folder / "run"

    def refused(message, *options, place=run):
        with pytest.raises(SystemExit, match=message) as stop:
            layers.main([str(place), *options, "--device", "cpu", "--out", str(folder / "refused")])
        assert "\n" not in stop.value.code

    refused(r"run has \d+ sequences of 37 tokens; use --sequences \d+", "--sequences", "9999999")
    refused("no checkpoint of step 1; there: 2, 3", "--step", "1")
    refused("no metrics.jsonl under .*nowhere", place=folder / "nowhere")
    for damaged, message, *options in (
        ("checkpoints/step_00000002/.metadata", r"^run: .*step_00000002 is damaged", "--step", "2"),
        ("weights/model.safetensors", r"run is finished, but weights/model\.safetensors is"),
    ):
        file = run / damaged
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])
        refused(message, *options)
        file.write_bytes(whole)
    config = run / "config.yaml"
    config.write_text(config.read_text() + "unheard_of: 1\n")
    refused(r"not of this version of the code: .*unheard_of")
    (run / "DONE").unlink()
    config.write_text(config.read_text().replace("unheard_of: 1\n", ""))
    refused(r"no finished weights; leave it out, train it to its end .*--step")
    assert not list(folder.glob("refused*"))
