"""The families of docs/models.md: what of each runs in INT8, and that its gradients are right.

Each makes a training step on the CPU in full precision, one with SageBwd that may fall back, one that may
not, and one with nothing in INT8, where a wrong mask, scale or head shows beyond the rounding of fp32. Truth
for the outcome is the stored table. Most families run only with -m gpu, which is for all that takes long.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

import sagebwd
from sagebwd import SageConfig
from sagebwd.integrations import torch_flash
from sagebwd.integrations.transformers import register
from tests.sagebwd.integrations import families
from tests.sagebwd.integrations.families import RESULTS, cosine

#: Older than constraints.txt has.
IS_OLD = Version(transformers.__version__) < Version("5.20")
QUICK = (
    *("Mistral", "DeepSeek-V2", "Whisper", "ViT", "MiMo-V2-Flash", "Gemma 2", "T5", "DeBERTa-v2"),
    "DeepSeek-V3.2",
    *("Qwen-Image", "Chroma", "HunyuanVideo", "HunyuanVideo, by `torch_flash`"),
)
NOTHING_INT8 = SageConfig(int8_matmuls=())

#: The gradients, and the names of the parameters of attention layers.
Step = tuple[dict[str, Tensor], set[str]]


def rows_of(library):
    """The stored rows of a library."""
    for row in RESULTS[library]["rows"]:
        marks = () if row["family"] in QUICK else pytest.mark.gpu
        yield pytest.param(row, id=row["family"], marks=marks)


def refusal_of(step: Callable[[], Step]) -> str:
    """The message of a step that must not fall back; "" if it was taken."""
    try:
        step()
    except NotImplementedError as error:
        return str(error)
    return ""


def check(row: dict, truth: Step, found: Callable[[], Step], exact: Callable[[], Step]) -> None:
    """That a step may fall back as the table says, and its gradients are those of full precision."""
    gradients, attention = truth
    with warnings.catch_warnings(action="ignore"):  # what they say is in the report
        own = found()[0]
        calls = sagebwd.report().rows
        unquantized = exact()[0]
    full = [call for call in calls if not call.kernels]
    assert sum(call.calls for call in calls if call.kernels) == row["int8_calls"]
    assert sum(call.calls for call in full) == row["full_calls"]
    assert all(call.reason for call in full)
    assert cosine(unquantized, gradients) > 1 - 1e-9
    for among in (None, attention):
        # A few tiny models, as that of Phi-3.5-MoE, have less in the table, too.
        stored = row["cosine"] if among is None else row["attention_cosine"]
        assert cosine(own, gradients, among) > min(0.998, stored - 1e-3)


@pytest.fixture(scope="module")
def names():
    register("int8-or-error")
    register("int8-or-full", fallback="sdpa")
    register("unquantized", NOTHING_INT8, fallback="sdpa")


@pytest.mark.parametrize("row", list(rows_of("transformers")))
def test_a_family_of_transformers_trains_as_the_table_says(row, names):
    if row["family"] == "Doge" and IS_OLD:
        pytest.skip("this version's Doge wants another shape of its mask")

    def step(attention):
        return families.train_step(row["family"], row["model"], attention)

    refusal = refusal_of(lambda: step("int8-or-error"))
    assert bool(refusal) == bool(row["refusal"])
    assert (row["refusal"] or "").partition(";")[0] in refusal  # what is not computed
    assert not refusal or "use " in refusal  # it says what to do instead
    sagebwd.report(clear=True)
    if row["cosine"] is None:
        with warnings.catch_warnings(action="ignore"), pytest.raises(NotImplementedError):
            step("int8-or-full")
        return
    truth = step(families.full_precision_of(row["model"]))
    sagebwd.report(clear=True)
    check(row, truth, lambda: step("int8-or-full"), lambda: step("unquantized"))


#: By family of docs/models.md's table of compiled models: its class, the part of its calls that runs in INT8,
#: and the cosine of its gradients. The logits of Gemma 4 are too large for an INT8 S.
COMPILED = {
    "Qwen3": ("Qwen3ForCausalLM", 1.0, 0.9996),
    "Gemma 3": ("Gemma3ForCausalLM", 1.0, 0.9997),
    "Gemma 4": ("Gemma4ForCausalLM", 1.0, 0.976),
    "GPT-OSS": ("GptOssForCausalLM", 1.0, 0.9996),
    "ModernBERT": ("ModernBertForMaskedLM", 1.0, 0.9999),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", 1.0, 0.9998),
    "Whisper": ("WhisperModel", 1.0, 0.9999),
    "SigLIP": ("SiglipModel", 1.0, 0.9999),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it
@pytest.mark.filterwarnings("ignore:.* runs in full precision, not in INT8:UserWarning")
@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=() if x == "DeepSeek-V3" else pytest.mark.gpu) for x in COMPILED]
)
def test_a_compiled_family_is_one_graph_with_the_gradients_of_eager(family, names):
    if family == "Whisper" and IS_OLD:
        pytest.skip("this version's Whisper branches on a random number")
    model, share, least = COMPILED[family]
    truth, _ = families.train_step(family, model, "eager")
    torch.compiler.reset()
    found, _ = families.train_step(
        family, model, "int8-or-full", lambda x: torch.compile(x, backend="eager", fullgraph=True)
    )
    calls = sagebwd.report().rows
    assert sum(row.calls for row in calls if row.kernels) == share * sum(row.calls for row in calls)
    assert cosine(found, truth) > least - 1e-4


@pytest.fixture(scope="module")
def backends():
    pytest.importorskip("diffusers", reason="diffusers is not installed; it needs Python 3.11")
    from tests.sagebwd.integrations import diffusers_families

    return diffusers_families


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # that Chroma of diffusers imports
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi asks for float32
@pytest.mark.parametrize("row", list(rows_of("diffusers")))
def test_a_family_of_diffusers_trains_as_the_table_says(row, backends):
    family = backends.FAMILIES[row["family"].removesuffix(", by `torch_flash`")]

    def step(backend):
        return backends.train_step(family, backend)

    def replaced(config):
        with torch_flash.patch_sdpa(config):
            return step("native")

    by_torch_flash = family.name != row["family"]
    truth = step("native")
    if by_torch_flash:
        check(row, truth, lambda: replaced(SageConfig()), lambda: replaced(NOTHING_INT8))
        return
    assert bool(refusal_of(lambda: step("sagebwd"))) == bool(row["refusal"])
    sagebwd.report(clear=True)
    check(row, truth, lambda: step("sagebwd_or_full"), lambda: step("sagebwd_exact_or_full"))


def test_every_family_of_the_table_got_gradients_or_a_way_out():
    rows = [row for result in RESULTS.values() for row in result["rows"]]
    assert len(rows) > 100
    for row in rows:
        assert row["lost"] == 0, row["family"]
        assert row["int8_calls"] or row["full_calls"] or row["refusal"], row["family"]
        assert row["cosine"] is None or row["cosine"] > 0.99, row["family"]
