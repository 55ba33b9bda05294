"""The code samples run, on a CPU and with small models."""

import copy

import pytest
import torch

from tests.docs import pages
from tests.docs.pages import PAGES, ROOT


@pytest.fixture
def names(tmp_path):
    """What the samples take as given."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "name": str(tmp_path)}


def run(code, page, names):
    """With the small model in place of one to download."""
    exec(compile(code.replace('"Qwen/Qwen3-0.6B"', "name"), pages.name(page), "exec"), names)


SAMPLES = [page for page in PAGES if pages.blocks(page, "python")]


@pytest.mark.parametrize("page", SAMPLES, ids=pages.name)
def test_samples_run_in_order(page, names):
    torch.manual_seed(0)
    for code in pages.blocks(page, "python"):
        if "import diffusers" in code or "from diffusers" in code:
            pytest.importorskip("diffusers", reason="diffusers is not installed; it needs Python 3.11")
        run(code, page, names)
    out = names.get("out")
    assert out is None or out.isfinite().all()
    if page == ROOT / "README.md":
        check_that_it_computes_with_sagebwd(names["model"])


def check_that_it_computes_with_sagebwd(model):
    tokens = torch.arange(40)[None] % 64
    exact = copy.deepcopy(model)
    exact.set_attn_implementation("sdpa")
    logits, expected = model(tokens).logits, exact(tokens).logits
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)
