"""Bias and noise of gradients: from a run to its numbers."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import model.huggingface
from data.loader import BatchLoader
from model.llama import Llama
from sagebwd import sage_attention
from scripts.output import read_json
from scripts.paper import gradient_bias, gradient_bias_gradients
from scripts.paper.gradient_bias import SETTINGS, parts
from scripts.paper.gradient_bias_gradients import draw_batches
from scripts.paper.gradient_bias_tables import CONTROL, GROUP_TITLES, Row
from scripts.paper.trained_runs import measure_all


def test_every_weight_is_in_its_group_and_layer(compose_settings):
    llama = Llama(compose_settings("experiment=debug").model, scaled_dot_product_attention)
    names = [name for name, _ in llama.named_parameters()]
    found = parts(names)
    assert found["all", None] == names
    assert sorted(
        name for group in GROUP_TITLES if group not in ("all", "qk") for name in found[group, None]
    ) == (sorted(names))
    assert found["qk", 1] == ["layers.1.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight"]
    assert found["norms", None] == [name for name in names if "layernorm" in name] + ["norm.weight"]
    assert len(found["gains", None]) == 4
    assert len(found["all", 0]) == 11
    assert ("norms", 0) not in found


class Tokens:
    """Ten sequences of eight tokens; token i is i."""

    name = "ten"

    def __len__(self):
        return 81

    def window(self, first, count):
        return np.arange(first, first + count)


@pytest.mark.parametrize(("last_step", "unseen"), [(0, True), (2, True), (4, False), (7, False)])
def test_batches_are_disjoint_and_behind_the_end_of_the_run(compose_settings, last_step, unseen):
    settings = compose_settings("experiment=debug", "context=8", "tps.tokens_per_step=16", "tps.divide_by=1")
    corpus = SimpleNamespace(train=Tokens())
    run = SimpleNamespace(name="run", settings=settings, corpus=corpus, step=last_step)
    batches, found_unseen = draw_batches(run, 3, 16)
    loader = BatchLoader(Tokens(), context=8, sequences_per_step=2, micro_batch=1, seed=settings.seed)
    before = {index for step in range(last_step) for index in loader.sequence_indices(step)}
    chosen = [int(index) // 8 for inputs, _ in batches for index in inputs[:, 0]]
    assert [len(inputs) for inputs, _ in batches] == [2, 2, 2]
    assert len(set(chosen)) == 6
    assert chosen[:2] == loader.sequence_indices(last_step).tolist()
    assert found_unseen == unseen == before.isdisjoint(chosen)


SHAPE = ("model.n_heads=4", "model.n_kv_heads=2", "context=37", "hardware.micro_batch=2")


def test_from_a_run_to_its_numbers(train_here, tmp_path, monkeypatch):
    for name, size in (("COLUMNS_AT_ONCE", 700), ("COLUMNS_OF_PIECE", 64)):
        monkeypatch.setattr(gradient_bias_gradients, name, size)
    trainer = train_here(
        tmp_path / "run", "steps=3", *SHAPE, "tps.tokens_per_step=148", "tps.divide_by=1",
        "eval_every=99", "sample_tokens=0", "probe.every=0", "checkpoint_every=2", "milestone_every=2",
        "keep_checkpoints=1", "optimizer.beta2=0.9",
    )  # fmt: skip
    out = tmp_path / "out" / "bias"
    chosen = ["--settings", CONTROL, "paper", "all_int8", "--batches", "4", "--tokens-per-batch", "222"]
    gradient_bias.main(
        [str(tmp_path / "run"), "--milestones", *chosen, "--device", "cpu",
         "--out", str(out)]
    )  # fmt: skip
    result = read_json(tmp_path / "out" / "bias.json")
    assert [place["step"] for place in result["checkpoints"]] == [3, 2]
    assert result["runs"]["run"]["batches_unseen"]

    expected = expected_at_the_end(trainer, tmp_path / "run")
    rows = [Row(**row) for row in result["rows"]]
    for setting, views in expected.items():
        for view, found in views.items():
            row = next(
                row for row in rows
                if (row.step, row.setting, row.view) == (3, setting, view)
                and (row.group, row.layer) == ("qk", 1)
            )  # fmt: skip
            for name, values in found.items():
                actual = [math.inf if x is None else x for x in getattr(row, name)]
                assert actual == pytest.approx(values, rel=2e-3), (setting, view, name)
    last = [row for row in rows if (row.step, row.view, row.group, row.layer) == (3, "raw", "all", None)]
    assert [row.setting for row in last] == [CONTROL, "paper", "all_int8"]
    assert abs(last[0].bias[0]) < 1e-4 < last[1].bias[0]
    own = [item for item in result["gradients"] if (item["step"], item["layer"]) == (3, None)]
    assert {item["group"] for item in own} == set(GROUP_TITLES)
    noise = next(item["noise_tokens"][0] for item in own if item["group"] == "all")
    assert noise == pytest.approx(last[1].critical_tokens[0] * last[1].bias[0] ** 2, rel=1e-2)
    differences = result["checkpoints"][0]["loss_differences"]
    assert abs(differences[CONTROL][0]) < 1e-5 < abs(differences["paper"][0])

    text = (tmp_path / "out" / "bias.md").read_text()
    assert f"compared with FlashAttention-2; `{CONTROL}` is math. Bias:" in text
    assert re.search(r"\| `paper` +\|", text)
    assert "Trained with fpa with QK-norm on 444 tokens, 148 a step" in text


def expected_at_the_end(trainer, path):
    """Bias, its part along the gradient and noise of the second layer's q and k, by loops over batches."""
    indices = np.concatenate([trainer.loader.sequence_indices(step) for step in range(3, 9)])
    windows = [
        torch.from_numpy(trainer.corpus.train.window(int(i) * 37, 38).astype("int64")) for i in indices
    ]
    batches = [torch.stack(windows[first : first + 6]) for first in range(0, 24, 6)]

    def gradients(attend):
        llama = model.huggingface.load(path / "weights", attend)
        weights = [getattr(llama.layers[1].self_attn, name).weight for name in ("q_proj", "k_proj")]
        losses = [llama(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in batches]
        found = [torch.autograd.grad(loss, weights) for loss in losses]
        return torch.stack([torch.cat([x.flatten() for x in each]) for each in found]).double()

    attention = trainer.llama.layers[1].self_attn
    states = [trainer.optimizer.state[x.weight] for x in (attention.q_proj, attention.k_proj)]
    v = torch.cat([state["exp_avg_sq"].flatten() for state in states]).double() / (1 - 0.9**3)
    g, expected = gradients(scaled_dot_product_attention), {}
    for setting in ("paper", "all_int8"):

        def attend(q, k, v, config=SETTINGS[setting], **options):
            return sage_attention(q, k, v, config=config, **options)

        d = gradients(attend) - g
        expected[setting] = {"raw": naive(d, g), "adam": naive(*(x / (v.sqrt() + 1e-8) for x in (d, g)))}
    return expected


def naive(d, g):
    def estimates(some):
        pairs = [(i, j) for i in some for j in some if i != j]
        bias, along, gradient = (
            torch.stack([left[i] @ right[j] for i, j in pairs]).mean().item()
            for left, right in ((d, d), (d, g), (g, g))
        )
        noise, minibatch = (x[some].square().sum(1).mean().item() for x in (d, g))
        noise, minibatch = noise - bias, minibatch - gradient
        return along / gradient, noise / minibatch, bias / gradient, bias / minibatch

    whole = list(range(len(d)))
    left_out = np.array([estimates([i for i in whole if i != left]) for left in whole])
    found = {}
    names = ("along", "noise", "bias", "critical_tokens")
    for name, estimate, without in zip(names, estimates(whole), left_out.T, strict=True):
        half = 3.182 * math.sqrt(3 * np.var(without))  # (n − 1)/n Σ(x − mean)², with n = 4
        found[name] = [estimate, estimate - half, estimate + half]
    found["bias"] = [math.copysign(math.sqrt(abs(x)), x) for x in found["bias"]]
    tokens = [222 / x if x > 0 else math.inf for x in found["critical_tokens"]]
    return found | {"critical_tokens": [tokens[0], tokens[2], tokens[1]]}


def test_what_was_measured_before_an_interruption_is_in_the_file(tmp_path):
    """Numbers after each step; tables after each piece."""

    def steps():
        for i in range(3):
            if i == 2:
                raise KeyboardInterrupt
            yield [Row("run", i, 0, "paper", "raw", "all", None, [], [], [], [])]

    arguments = SimpleNamespace(out=tmp_path / "x")
    with pytest.raises(KeyboardInterrupt):
        measure_all(arguments, {"a": 1}, [("title", steps())], lambda result, rows: "")
    assert [row["step"] for row in read_json(tmp_path / "x.json")["rows"]] == [0, 1]
    assert not (tmp_path / "x.md").exists()
