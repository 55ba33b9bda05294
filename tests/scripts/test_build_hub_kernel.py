"""The Hub kernel as its users load it: by the `kernels` package, beside the installed sagebwd."""

import base64
import hashlib
import json
import shutil
import sys

import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils
from transformers.integrations import hub_kernels

import sagebwd
from scripts import build_hub_kernel
from scripts.build_hub_kernel import PACKAGE, build
from tests import inputs as attention

kernels = pytest.importorskip("kernels")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The folder that the command writes."""
    out = tmp_path_factory.mktemp("hub")
    build_hub_kernel.main(["--out", str(out)])
    return out


@pytest.fixture(scope="module")
def hub(repository):
    """The kernel, as get_kernel would return it."""
    return kernels.get_local_kernel(repository)


@pytest.mark.parametrize("chosen", ["reference", "triton"])
def test_computes_what_the_package_computes(chosen, hub, draw):
    """In Triton, too, whose kernels take functions and constants from other modules of the kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = [x.to(device) for x in draw(40, batch=1, heads=2, head_dim=32, dtype=torch.float16)]
    ours, truth = (
        attention.gradients(
            library.sage_attention,
            *inputs,
            is_causal=True,
            kernels=chosen,
            config=library.SageConfig.consistent(),
        )
        for library in (hub, sagebwd)
    )
    assert all(torch.equal(x, y) for x, y in zip(ours, truth, strict=True))


def test_depends_on_torch_and_itself_and_has_operators_of_its_own(hub):
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == hub.__name__]
    assert len(modules) > 10
    for module in modules:
        for name, value in vars(module).items():
            origin = str(getattr(value, "__module__", "")).partition(".")[0]
            assert origin != "sagebwd", f"{module.__name__}.{name}"
    assert hub.sage_attention is not sagebwd.sage_attention
    assert getattr(torch.ops, hub.__name__).forward.default is not torch.ops.sagebwd.forward.default
    assert set(sagebwd.__all__) <= set(hub.__all__)
    assert all(hasattr(hub, name) for name in hub.__all__)


def test_two_builds_in_one_process(hub, tmp_path, draw):
    """A version with other sources takes another namespace."""
    package = tmp_path / "sagebwd"
    shutil.copytree(PACKAGE, package)
    with (package / "metrics.py").open("a") as file:
        file.write("CHANGED = True\n")
    build(tmp_path / "hub", package)
    other = kernels.get_local_kernel(tmp_path / "hub")
    assert other.__name__ != hub.__name__
    inputs = draw(40, batch=1, heads=1, head_dim=32)
    for function in (other.sage_attention, hub.sage_attention):
        assert attention.gradients(function, *inputs)[1].isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_metadata_and_that_the_same_sources_give_the_same(backend, repository, tmp_path):
    (tmp_path / "build" / "torch-old").mkdir(parents=True)
    build(tmp_path)
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == ["torch-cpu", "torch-cuda"]
    variant, again = (root / "build" / f"torch-{backend}" for root in (repository, tmp_path))
    assert (variant / "metadata.json").read_text() == (again / "metadata.json").read_text()
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"]["type"] == backend
    assert metadata["id"].isidentifier()
    files = {path.relative_to(variant).as_posix(): path for path in variant.rglob("*.*")}
    files = {name: path for name, path in files.items() if "__pycache__" not in name}
    assert files.pop("metadata.json")
    assert files.keys() == metadata["digest"]["files"].keys()
    assert "kernels/cuda/packing.cu" in files
    for name, digest in metadata["digest"]["files"].items():
        assert base64.b64decode(digest) == hashlib.sha256(files[name].read_bytes()).digest()


# --- Sources that cannot be built --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("own.py", "import sagebwd", r"own\.py, line 1 names the installed package"),
        ("own.py", "import torch\nf = torch.ops.sagebwd.forward", r"own\.py, line 2 names the installed"),
        ("own.py", "f'sagebwd.kernels.{name}'", r"own\.py, line 1 names the installed package"),
        ("own.py", "name = 'sagebwd::forward'", r"own\.py, line 1 names the installed package"),
        ("_ops.py", "NAMESPACE = 'other'", r"_ops\.py has no line NAMESPACE = \"sagebwd\""),
    ],
)
def test_what_would_need_more_than_torch_is_refused(file, text, message, tmp_path):
    package = tmp_path / "sagebwd"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "hub", package)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("another project")
    (tmp_path / "setup.py").write_text("")
    with pytest.raises(SystemExit, match=r"has other files \(setup\.py\); give an empty folder"):
        build_hub_kernel.main(["--out", str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == "another project"


# --- transformers ------------------------------------------------------------------------------------------


def gradients(model, attention):
    """Of all parameters, for a batch in which one text is shorter."""
    model.set_attn_implementation(attention, allow_all_kernels=True)
    model.zero_grad()
    tokens = torch.arange(58).view(2, 29) % 61
    mask = torch.ones_like(tokens)
    mask[1, 20:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def relative_error(x, truth):
    return float((x - truth).norm() / truth.norm())


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, initializer_range=0.12))


def test_trains_a_model_of_transformers(hub, model):
    """The truth is transformers' own attention; without INT8 nothing but rounding may differ."""
    hub.integrations.transformers.register("hub")
    hub.integrations.transformers.register("hub-exact", hub.SageConfig(int8_matmuls=()))
    truth = gradients(model, "eager")
    assert relative_error(gradients(model, "hub-exact"), truth) < 1e-5
    assert 1e-4 < relative_error(gradients(model, "hub"), truth) < 0.05


@pytest.fixture
def transformers_finds_it(repository, monkeypatch):
    """As owner/sagebwd on the Hub: `kernels` takes a folder for it; transformers may want other `kernels`."""
    monkeypatch.setenv("LOCAL_KERNELS", f"owner/sagebwd={repository}")

    def get_kernel(name, revision, version, allow_all_kernels):
        return kernels.get_kernel(
            name, revision=revision, version=version, trust_remote_code=allow_all_kernels
        )

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)


def test_transformers_trains_with_a_name_of_the_hub(model, transformers_finds_it):
    """Through transformers' own code for FlashAttention, which packs texts of several lengths."""
    truth = gradients(model, "eager")
    assert 1e-4 < relative_error(gradients(model, "owner/sagebwd"), truth) < 0.05
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(NotImplementedError, match="dropout"):
        gradients(model, "owner/sagebwd")
