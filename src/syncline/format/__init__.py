"""Bytes at rest: what lies in a run, as `docs/reference/format.md` says; nothing about stores.

`head` and `manifest` turn the values of `syncline.version` into JSON and back, with one validator
for both directions (`rules`); `part` reads and writes the safetensors files; `index` writes what
Hugging Face and slime-family readers need; `names` spells keys; `zstd` and `strict_json` are the
only doors to zstandard and to JSON. Every input is checked before memory is allocated for it.
"""
