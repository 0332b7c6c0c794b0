"""Loading a model and its tokenizer with transformers: from a directory, in silence, never online."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from syncline.errors import ConfigError

TINY_PARAMETERS = 1_000_000


def require(module: str, package: str | None = None) -> Any:
    """Import and return an optional module of the package of that name, or of `package`.

    Raises:
        ConfigError: it is not installed; says which package has it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo needs the package {module if package is None else package}, which is not "
            f"installed (no module {error.name!r}); run: pip install 'syncline[demo]'"
        ) from error


def transformers() -> Any:
    """Return the transformers module with its progress bars and warnings turned off."""
    module = require("transformers")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


def load_model(directory: Path, dtype: Any, **options: Any) -> Any:
    """Return the causal language model in `directory`, in inference mode, in `dtype`.

    Calls `limit_threads`.

    Raises:
        ConfigError: transformers cannot load one from there; says why.
    """
    try:
        model = transformers().AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, local_files_only=True, **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"expected a Hugging Face checkpoint of a causal language model in {directory}, "
            f"found none that transformers loads: {error}"
        ) from error
    limit_threads(model)
    return model.eval()


def limit_threads(model: Any) -> None:
    """Keep torch to one thread, in the whole process, if the model is a tiny one.

    Its matrices are multiplied sooner than a second thread has woken, and where other programs
    keep the processors busy each wake-up can take milliseconds: measured, ten times slower.
    """
    if model.num_parameters() < TINY_PARAMETERS:
        require("torch").set_num_threads(1)


def load_tokenizer(directory: Path, **options: Any) -> Any:
    """Return the tokenizer in `directory`; it pads, with the end-of-text token if need be.

    Raises:
        ConfigError: transformers cannot load one from there; says why.
    """
    try:
        tokenizer = transformers().AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"expected a tokenizer in {directory}, found none that transformers loads: {error}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class StopTokens:
    """The tokens that end a completion: the end of text, and every token whose text contains a given one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: dict[str, list[int]] = {}

    def __call__(self, stop: str) -> list[int]:
        """Return their ids; every token is looked at once for each `stop`."""
        if stop not in self._found:
            every = range(len(self._tokenizer))
            texts = self._tokenizer.batch_decode([[token] for token in every])
            found = [token for token, text in enumerate(texts) if stop in text]
            self._found[stop] = [self._tokenizer.eos_token_id, *found]
        return self._found[stop]
