"""Load checkpoints that transformers wrote, and generate with them.

``load_causal_lm`` opens a folder with ``config.json`` and safetensors. Those of this example are
tiny and random, of the Llama, Qwen3 and Gemma 3 families; the tests hold them with the logits that
transformers gave. The picture shows how far the logits here are from those. The decoder, which
keeps keys and values, then continues a prompt, and the tokens it chooses are compared with the
likeliest ones when all is read at once. Run it with ``python docs/examples/load_checkpoint.py``, or
with folders of your own.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import pytensor
from matplotlib.figure import Figure

from pytensor_ml.generation import Decoder, generate
from pytensor_ml.layers import Input
from pytensor_ml.models import load_causal_lm
from pytensor_ml.pytensorf import BACKENDS, backend_mode, compile_predict

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"
CHECKPOINTS = [GOLDEN / name for name in ("llama_gqa", "qwen3_head_dim", "gemma3_text")]
PROMPT_LENGTH, NEW_TOKENS = 5, 8

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoints", type=Path, nargs="*", default=CHECKPOINTS, help="folders")
parser.add_argument("--backend", choices=BACKENDS, default="numba")
parser.add_argument("--quick", action="store_true", help="only the first checkpoint")
parser.add_argument(
    "--folder",
    type=Path,
    default=REPOSITORY / "docs" / "images",
    help="where the picture goes",
)
options = parser.parse_args()
pytensor.config.floatX = "float32"
# The linker's advice about BLAS is repeated in the README.
warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
mode = backend_mode(options.backend)
checkpoints = options.checkpoints[:1] if options.quick else options.checkpoints

differences = {}
for path in checkpoints:
    model = load_causal_lm(path)
    logits = model(Input("ids", (None, None), "int64"))
    score = compile_predict(logits, compile_kwargs={"mode": mode})
    golden = path / "expected.npz"
    if golden.exists():
        expected = np.load(golden)
        ids = expected["input_ids"]
        apart = np.abs(np.asarray(score(ids)) - expected["logits"])
        differences[path.name] = apart.ravel()
        print(
            f"{path.name}: logits up to {np.abs(expected['logits']).max():.2f}, at most "
            f"{apart.max():.1e} from those of transformers"
        )
    else:
        ids = np.random.default_rng(0).integers(model.embedding.n_embeddings, size=(1, 8))
        print(f"{path.name}: there are no logits to compare with")

    prompt = ids[0, :PROMPT_LENGTH].tolist()
    decoder = Decoder(model, capacity=PROMPT_LENGTH + NEW_TOKENS, mode=mode)
    new = [int(token) for [token] in generate(decoder, [prompt], max_new_tokens=NEW_TOKENS)]
    likeliest = np.asarray(score(np.array([prompt + new])))[0].argmax(axis=-1)
    same = int((likeliest[PROMPT_LENGTH - 1 : -1] == new).sum())
    print(f"{path.name}: {prompt} goes on {new}, {same} of {len(new)} as when read at once")

if differences:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, apart in differences.items():
        axes.plot(np.sort(apart), np.linspace(0, 1, apart.size), label=name)
    axes.set_xlabel("difference from the logit of transformers")
    axes.set_ylabel("share of the logits that differ by less")
    axes.legend()
    picture = options.folder / "load_checkpoint.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)
    print(f"wrote {picture}")
