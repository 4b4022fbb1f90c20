#!/usr/bin/env bash
# datasets 5.2.0: after the code of an imported function was changed, `map` returns what the old code made. The guess was that a new process computes
# anew where the function is a new one: the documentation says that the function is part of the fingerprint.
#
# Seen (2026-11-29): functions of the script itself are stored with their code, functions that were imported from another file by name alone. What the
# script's function calls in another file, directly or in a class, is not seen either, and neither is a constant there. A step of preprocessing
# that lives in a module of its own, as it does in any larger project, can be repaired, and the next run trains and evaluates on the cached rows of
# the broken one. Only the progress bar, which is missing, tells. The same change within the script computes anew; load_from_cache_file=False does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq datasets==5.2.0 numpy==2.4.6
cd "$folder"
export HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
echo '{"text": "Hello world"}' > rows.jsonl
cat > steps.py <<'PYTHON'
EXTRA = 0


def letters(text):
    return len(text) + EXTRA


def count(row):
    return {"letters": letters(row["text"])}
PYTHON
cat > script.py <<'PYTHON'
import datasets
from steps import count, letters


def here(row):
    return {"letters": len(row["text"])}


def calls_other_file(row):
    return {"letters": letters(row["text"])}


datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
functions = {"imported": count, "calls another file": calls_other_file, "here": here}
print("; ".join(f"{name}: {rows.map(function)['letters'][0]}" for name, function in functions.items()))
PYTHON
"$folder/venv/bin/python" -c 'import datasets; print("datasets", datasets.__version__)'
first=$("$folder/venv/bin/python" script.py 2>"$folder/log") || { cat "$folder/log"; exit 1; }
sed -i 's/len(text) + EXTRA/1000 + len(text) + EXTRA/' steps.py
sed -i 's/"letters": len(row\["text"\])/"letters": 1000 + len(row["text"])/' script.py
changed=$("$folder/venv/bin/python" script.py 2>"$folder/log") || { cat "$folder/log"; exit 1; }
sed -i 's/EXTRA = 0/EXTRA = 7000/' steps.py
constant=$("$folder/venv/bin/python" script.py 2>"$folder/log") || { cat "$folder/log"; exit 1; }
echo "at first: $first"
echo "with 1000 added in both files: $changed"
echo "with another constant as well: $constant"
[ "$first" = "imported: 11; calls another file: 11; here: 11" ] && [ "$changed" = "imported: 11; calls another file: 11; here: 1011" ] \
    && [ "$constant" = "$changed" ] || { echo "the behaviour has changed"; exit 1; }
