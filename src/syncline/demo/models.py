"""Loading a model and its tokenizer with transformers: from a directory, in silence, never online."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from syncline.errors import ConfigError


def require(module: str, package: str) -> Any:
    """Import and return an optional module.

    Raises:
        ConfigError: it is not installed; says which package has it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo needs the package {package}, which is not installed "
            f"(no module {error.name!r}); run: pip install 'syncline[demo]'"
        ) from error


def transformers() -> Any:
    """Return the transformers module with its progress bars and warnings turned off."""
    module = require("transformers", "transformers")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


def load_model(directory: Path, dtype: Any, **options: Any) -> Any:
    """Return the causal language model in `directory`, in inference mode, in `dtype`.

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
    return model.eval()


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
