#!/bin/bash
# The measurements of this folder, one after the other:  TEXT=text bash measurements/go.sh FOLDER [PART …]
#
# PART: programs (5 minutes on one H200), float8 (4), muon (3); all if none is named. Results are FOLDER/*.json, logs
# FOLDER/*.log. TEXT: a folder with train.parquet, English of 40 MB or more (10 million tokens), and validation.parquet,
# each with a column `text`. TIKTOKEN_CACHE_DIR holds GPT-2's vocabulary. TINY=1: tiny sizes, on a CPU.
#
# Needs, besides torch ≥ 2.11, Triton, transformers, tokenizers, accelerate, peft, tiktoken, pyarrow, pandas,
# matplotlib, xxhash, zipp, these wheels, 12 MB together (Python 3.12, x86-64):
#   hydra_core 1.3.8, omegaconf 2.3.1, antlr4_python3_runtime 4.9.3 (a wheel built from its source, pure Python)
#   trl 1.16.0, datasets 5.2.0, dill 0.4.1, multiprocess 0.70.19                  programs
#   diffusers 0.42.1, importlib_metadata 10.2.0, lazy_importer 0.1.0              programs
#   torchao 0.18.0 (its extensions are for other operators and may fail to load)  float8
set -u
TEXT=$(realpath "$TEXT") FOLDER=$(realpath -m "$1") && mkdir -p "$FOLDER" && shift
cd "$(dirname "$0")/.."
PARTS=${*:-programs float8 muon}
TINY=${TINY:+--tiny}
SCRATCH=$(mktemp -d) && trap 'rm -rf "$SCRATCH"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

limited() { # NAME SECONDS COMMAND …
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout -k 10 "$seconds" "$@" >>"$FOLDER/$name.log" 2>&1 || echo "$name: exit $? after $SECONDS s"
}

for part in $PARTS; do
    SECONDS=0
    case $part in
    programs)
        limited programs 540 python3 measurements/programs_train.py --text "$TEXT/train.parquet" --out "$FOLDER/programs.json" $TINY
        ;;
    float8)
        limited float8 400 python3 measurements/float8.py --text "$TEXT/train.parquet" --out "$FOLDER/float8.json" $TINY
        ;;
    muon) # 25 million tokens a run; Muon and AdamW with SageBwd, then Muon in full precision
        settings=(runs_dir="$SCRATCH/runs" experiment=debug)
        [ "$TINY" ] || settings=(runs_dir="$SCRATCH/runs" experiment=scaled_131k steps=190 tps.warmup_steps=25 eval_every=190
            checkpoint_every=190 probe.every=0 sample_tokens=0 data=parquet "data.path='$TEXT/train.parquet'"
            "data.val_path='$TEXT/validation.parquet'" data.root="$SCRATCH/tokens")
        limited muon 150 python3 train.py -m "${settings[@]}" attention=sagebwd optimizer=adamw,muon
        limited muon 90 python3 train.py -m "${settings[@]}" attention=fpa optimizer=muon
        limited muon 60 python3 -m scripts.compare "$SCRATCH/runs" --out "$FOLDER/muon.png"
        python3 - "$SCRATCH/runs" "$FOLDER/muon.json" <<'END'
import json, pathlib, sys
runs = sorted(pathlib.Path(sys.argv[1]).glob("*/metrics.jsonl"))
found = {path.parent.name: [json.loads(line) for line in path.read_text().splitlines()] for path in runs}
pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
END
        ;;
    esac
    tail -n 25 "$FOLDER/$part.log"
    echo "$part: $SECONDS s"
done
