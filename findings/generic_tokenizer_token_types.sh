#!/usr/bin/env bash
# transformers 5.23.0: the generic tokenizer class makes no token types, which it made in 4.57. The guess was that a pair of texts keeps
# them, since tokenizer.json says them.
#
# Seen: of one folder with tokenizer.json and `tokenizer_class: PreTrainedTokenizerFast`, AutoTokenizer 4.57 gives a pair of texts token types
# 0 and 1, and 5.23 gives none. A BERT then reads the second text as part of the first. Nothing warns; `model_input_names` in
# tokenizer_config.json brings them back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/pair.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

folder, names = Path(sys.argv[1]), json.loads(sys.argv[2])
folder.mkdir()
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)
tokenizer.save(str(folder / "tokenizer.json"))
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
(folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"model_input_names": names} if names else {})))
(folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
types = transformers.AutoTokenizer.from_pretrained(folder)("a", "b").get("token_type_ids")
print(f"transformers {transformers.__version__}, model_input_names {names}: token types of a pair: {types}")
print(json.dumps(types), file=sys.stderr)
PYTHON
check() {
    local seen
    seen=$("$folder/$1/bin/python" "$folder/pair.py" "$folder/model-$RANDOM" "$2" 2> "$folder/told")
    echo "$seen"
    [ "$(tail -n 1 "$folder/told")" = "$3" ] || { echo "the behaviour has changed" >&2; exit 1; }
}
for version in 4.57.6 5.23.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -qq "transformers==$version"
done
check 4.57.6 null '[0, 0, 0, 1, 1]'
check 5.23.0 null null
check 5.23.0 '["input_ids", "token_type_ids", "attention_mask"]' '[0, 0, 0, 1, 1]'
