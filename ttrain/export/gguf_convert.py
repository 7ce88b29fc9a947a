"""Run llama.cpp's `convert_hf_to_gguf.py` for a tokenizer that it cannot know. Imports no ttrain.

python gguf_convert.py PRE_TOKENIZER path/to/convert_hf_to_gguf.py [its arguments]

The converter recognises how a byte-level BPE splits text by a digest of one encoded text, so it
refuses every new tokenizer (https://github.com/ggml-org/llama.cpp/pull/6920). Here it gets the
name.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def main(pre_tokenizer: str, script: Path, arguments: list[str]) -> None:
    """Run the converter, which ends the process itself where it fails."""
    sys.path[:0] = [str(script.parent), str(script.parent / "gguf-py")]
    converter: Any = importlib.import_module(script.stem)
    kind: Any = importlib.import_module("conversion.base").TextModel
    recognise = kind.get_vocab_base_pre

    def get_pre_tokenizer(self: Any, tokenizer: Any) -> str:
        try:
            return str(recognise(self, tokenizer))
        except NotImplementedError:
            return pre_tokenizer

    kind.get_vocab_base_pre = get_pre_tokenizer
    sys.argv = [str(script), *arguments]
    converter.main()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
