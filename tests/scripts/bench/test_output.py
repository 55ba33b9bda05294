"""What all benchmarks share: where they write, and what they refuse."""

import gzip
from argparse import ArgumentParser
from pathlib import Path

import pytest

from scripts import output
from scripts.bench import attention, gpus, prepare, training
from scripts.bench.attention_peers import CONFIGS, PEERS
from scripts.bench.looks import ATTENTION_LOOKS, STEP_PARTS, TRAINING_LOOKS, look_of
from scripts.paper.experiments import ITEMS, SCALES

COMMANDS = {
    attention: ["--device", "cpu"],
    training: ["--device", "cpu"],
    gpus: ["--device", "cpu"],
    prepare: ["files"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_without_out_nothing_is_written_into_results(command):
    out = command.parse_arguments(COMMANDS[command]).out
    assert out.parent == Path("runs/bench")


def test_reproduce_says_where_every_benchmark_writes():
    commands = [words for item in ITEMS for scale in SCALES for words in item.commands[scale]]
    benches = [words for words in commands if words[0].startswith("scripts.bench.")]
    assert {words[0] for words in benches} >= {command.__name__ for command in (attention, training, gpus)}
    for words in benches:
        assert words[words.index("--out") + 1].startswith("{results}/")


def resolved(*options):
    parser = ArgumentParser()
    output.add_output_options(parser.add_argument, "name")
    arguments = parser.parse_args(options)
    output.resolve_out(arguments, "name", parser)
    return arguments.out


def test_draw_writes_next_to_the_json_or_at_out(tmp_path):
    file = tmp_path / "v1.2.json"
    file.write_text("{}")
    assert resolved("--draw", str(file)) == tmp_path / "v1.2"
    assert resolved("--draw", str(file), "--out", "there/x") == Path("there/x")
    assert resolved("--out", "there/x") == Path("there/x")


@pytest.mark.parametrize("name", ["missing.json", "folder"])
def test_draw_refuses_what_is_not_a_json_file(tmp_path, name, capsys):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as end:
        resolved("--draw", str(tmp_path / name))
    assert end.value.code == 2
    assert "no such JSON file; give the one that a benchmark wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is damaged"), ("[]", "it has no rows"), ("{}", "it has no rows")]
)
def test_a_file_that_is_no_result_is_refused(tmp_path, text, message):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(SystemExit, match=message):
        output.read_result(tmp_path / "file.json")


def test_a_compressed_result_is_read_and_drawn_beside_itself(tmp_path):
    file = tmp_path / "v1.json.gz"
    file.write_bytes(gzip.compress(b'{"rows": [1]}'))
    assert output.read_result(file) == {"rows": [1]}
    assert resolved("--draw", str(file)) == tmp_path / "v1"
    file.write_bytes(b"not gzip")
    with pytest.raises(SystemExit, match="is damaged"):
        output.read_result(file)


def test_everything_that_is_measured_has_a_look():
    assert {name for name, _, _ in CONFIGS.values()} | {peer.name for peer in PEERS.values()} == {
        *ATTENTION_LOOKS
    }
    assert {*training.ATTENTIONS, *training.BASELINES} == {*TRAINING_LOOKS}


@pytest.mark.parametrize("looks", [ATTENTION_LOOKS, STEP_PARTS])
def test_no_two_bars_look_alike(looks):
    fills = [(look.color, look.hatch) for look in looks.values()]
    assert len(set(fills)) == len(fills)


def test_a_name_of_an_old_file_is_shown_as_it_is():
    assert look_of("sagebwd exact δ", ATTENTION_LOOKS).title == "SageBwd exact δ"
