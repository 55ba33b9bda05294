"""The table of model families: a few of them here, all by the command."""

import pytest

from data.files import read_json
from scripts import integration_table
from scripts.families import Row, transformers


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("Mistral", "INT8", ""),
        ("DeepSeek-V2", "INT8", ""),
        ("Whisper", "INT8", ""),
        ("ViT", "INT8", ""),
        ("MiMo-V2-Flash", "INT8 in part", "attention sinks (s_aux)"),
        ("Gemma 2", "full precision", "soft-capping of the logits (softcap)"),
        ("DeBERTa-v2", "full precision", "attention that the model computes itself"),
        ("DeepSeek-V3.2", "refused", ""),
    ],
)
def test_a_family_runs_as_the_table_says(name, outcome, reason):
    [row] = transformers.families([name])
    assert (row.outcome, row.fallback) == (outcome, reason)
    assert bool(row.refusal) == (outcome != "INT8")
    if outcome != "refused":
        assert row.cosine > 0.998
        assert row.exact_cosine > 1 - 1e-9
        assert row.lost == 0
    [stored] = [row for row in stored_rows() if row.family == name]
    assert (stored.outcome, stored.refusal) == (row.outcome, row.refusal)


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # that Chroma of diffusers imports
@pytest.mark.parametrize("name", ["Qwen-Image", "Chroma", "HunyuanVideo"])
def test_a_family_of_diffusers_runs_as_the_table_says(name):
    pytest.importorskip("diffusers", reason="diffusers is not installed; it needs Python 3.11")
    from scripts.families import diffusers

    stored = {row.family: row for row in stored_rows()}
    for row in diffusers.families([name]):
        assert row.exact_cosine > 1 - 1e-9
        assert row.cosine > 0.998
        of_row, of_stored = (
            (x.outcome, x.int8_calls, x.full_calls, x.fallback, x.refusal) for x in (row, stored[row.family])
        )
        assert of_row == of_stored


def stored_rows():
    results = read_json(integration_table.RESULT)
    return [Row(**row) for result in results.values() for row in result["rows"]]


def test_the_table_is_that_of_the_stored_results():
    page = integration_table.PAGE.read_text(encoding="utf-8")
    assert integration_table.renewed(page, read_json(integration_table.RESULT)) == page


def test_every_family_got_its_gradients_or_a_way_out():
    rows = stored_rows()
    assert sum(row.library.startswith("transformers") for row in rows) >= 40
    assert len({row.model for row in rows if row.library.startswith("diffusers")}) >= 12
    for row in rows:
        assert row.lost == 0, row.family
        assert row.outcome != "never called", row.family
        assert not row.full_calls or row.refusal or "torch_flash" in row.family, row.family
        assert row.cosine is None or row.cosine > 0.99, row.family
        assert row.exact_cosine is None or row.exact_cosine > 1 - 1e-9, row.family
        assert "use " in row.refusal or not row.refusal, row.family


def test_layers_that_differ_are_counted_apart():
    row = Row("library", "Family", "Class", int8_calls=5, full_calls=1, fallback="a bias", refusal="F: no")
    assert "| INT8 in 5 of 6 calls | – | – | – | a bias |" in integration_table.table([row])
    assert integration_table.refusals([row]).endswith("| no | Family |\n")
