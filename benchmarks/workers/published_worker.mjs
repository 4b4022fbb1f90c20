// An ONNX folder of `compress publish` in transformers.js; `published_folders.py` starts this file in a folder with node_modules.
//
//     node published_worker.mjs < request.json
//
// The request names folder, texts (a text, or a list of two), most tokens, class without its prefix ("" for vectors), dtype, and the file
// that gets the answers, float32 [n, C]. Nothing of this project is imported.

import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";

const library = createRequire(join(process.cwd(), "here.js"))("@huggingface/transformers");
const BATCH = 16;

const request = JSON.parse(readFileSync(0, "utf8"));
library.env.allowRemoteModels = false;
library.env.localModelPath = dirname(request.folder);
const name = basename(request.folder);

const answer = request.kind === "" ? await vectors() : await logits();
const answers = [];
for (let start = 0; start < request.texts.length; start += BATCH) {
  answers.push(...(await answer(request.texts.slice(start, start + BATCH))));
}
save(request.out, answers);
console.log(JSON.stringify({ "transformers.js": library.env.version, node: process.version }));

// Returns a function from texts to vectors.
async function vectors() {
  const model = await library.pipeline("feature-extraction", name, request.arguments);
  return async (texts) => (await model(texts, { pooling: "cls" })).tolist();
}

// Returns a function from rows to logits.
async function logits() {
  const tokenizer = await library.AutoTokenizer.from_pretrained(name);
  const model = await library[`AutoModel${request.kind}`].from_pretrained(name, request.arguments);
  return async (rows) => {
    const options = { padding: true, truncation: true, max_length: request.max_length };
    const pairs = Array.isArray(rows[0]);
    const first = pairs ? rows.map((row) => row[0]) : rows;
    const inputs = tokenizer(first, pairs ? { ...options, text_pair: rows.map((row) => row[1]) } : options);
    return (await model(inputs)).logits.tolist();
  };
}

// Writes float32 [n, C] as NumPy does.
function save(file, rows) {
  const text = `{'descr': '<f4', 'fortran_order': False, 'shape': (${rows.length}, ${rows[0].length}), }`;
  const header = Buffer.from(text.padEnd(128 - 10 - 1) + "\n", "latin1");
  const size = Buffer.alloc(2);
  size.writeUInt16LE(header.length);
  const start = Buffer.from("\x93NUMPY\x01\x00", "latin1");
  writeFileSync(file, Buffer.concat([start, size, header, Buffer.from(Float32Array.from(rows.flat()).buffer)]));
}
