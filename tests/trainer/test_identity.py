"""Recorded settings are data: they are read as they were written, and nothing in them is done."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import SettingsError
from data.settings import DataSettings
from scripts.runs import read_settings
from trainer import identity
from trainer.run_directory import RunDirectory
from trainer.settings import Settings

SECRET = "s3cret-value-123"


def recorded(**settings):
    return Settings(**settings).recorded()


texts = (
    st.text()
    | st.sampled_from("\x85\u2028\u2029\ufeff")
    | st.lists(st.sampled_from(["${", "}", "\\", "oc.env:HOME", "x", "'", "$", "{"])).map("".join)
)


@settings(max_examples=30)
@given(texts, texts)
def test_settings_are_read_as_they_were_recorded(tmp_path_factory, prompt, column):
    stored = recorded(sample_prompt=prompt, data=DataSettings(column=column, validation={"a": {"b": prompt}}))
    config = tmp_path_factory.getbasetemp() / "config.yaml"
    config.write_bytes(identity.as_yaml(stored).encode())
    assert identity.read(config) == stored
    complete = stored | {"tps": {"tokens_per_step": 8, "warmup_steps": 1}}
    for group in ("optimizer", "logger", "hardware", "probe", "spike"):
        complete[group] = {name: 1 for name, value in stored[group].items() if value == "???"}
    complete |= {name: 1 for name, value in complete.items() if value == "???" and name != "sample_prompt"}
    config.write_bytes(identity.as_yaml(complete).encode())
    read = read_settings(RunDirectory(config.parent))
    assert (read.sample_prompt, read.data.column) == (prompt, column)
    assert read.data.validation == {"a": {"b": prompt}}


def test_variables_in_recorded_settings_stay_text(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    with pytest.raises(SettingsError, match=r"MY_API_KEY") as error:
        Settings(attention={"backend": "fpa", "sdpa": "${oc.env:MY_API_KEY}"})
    assert SECRET not in str(error.value)
    stored = recorded()
    stored["attention"] = {"backend": "sagebwd", "kernels": "${oc.env:MY_API_KEY}"}
    assert SECRET not in identity.changes(stored, Settings())
