"""Trains a small character-level GPT on the Python standard library's sources.

python -m examples.train_gpt compare                  syncengine, DDP over Gloo, ShardedOptimizer, and a table
python -m examples.train_gpt train                    one run: alone, or on all ranks of torchrun, mpirun or srun
python -m examples.train_gpt sample --checkpoint F    a plain process loads what a run left, writes some text with it
"""

import argparse
import sys
from pathlib import Path

import torch

from examples.gpt.compare import compare
from examples.gpt.data import decode, encode, load_text
from examples.gpt.engine import ENGINES
from examples.gpt.train import LEAST_STEPS, TrainOptions, load, train, validation_loss

OUT = Path("outputs/train_gpt")


def main(argv: list[str] | None = None) -> int:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(prog="examples.train_gpt", description="A character-level GPT, data-parallel.")
    commands = parser.add_subparsers(dest="command", required=True)

    shape = argparse.ArgumentParser(add_help=False)
    for name in ("steps", "batch", "learning_rate", "seed", "layers", "width"):
        default = getattr(TrainOptions, name)
        shape.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help="default %(default)s"
        )
    shape.add_argument(
        "--numerics", choices=("rank_order", "ring"), help="of syncengine; DDP's own bits at any number of ranks: ring"
    )

    one = commands.add_parser("train", parents=[shape], help="one training run")
    one.add_argument("--engine", choices=ENGINES, default="syncengine")
    one.add_argument("--out", type=Path, default=OUT / "train", help="folder of the results; default %(default)s")

    both = commands.add_parser("compare", parents=[shape], help="syncengine, plain and sharded, beside DDP over Gloo")
    both.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    both.add_argument("--out", type=Path, default=OUT, help="folder of the results; default %(default)s")

    text = commands.add_parser("sample", help="write text with a trained model")
    text.add_argument(
        "--checkpoint", type=Path, default=OUT / "syncengine" / "checkpoint.pt", help="default %(default)s"
    )
    text.add_argument("--prompt", default="def ")
    text.add_argument("--length", type=int, default=400)

    options = vars(parser.parse_args(argv))
    if options.get("steps", LEAST_STEPS) < LEAST_STEPS:
        parser.error(f"--steps: at least {LEAST_STEPS}, so that some can be measured after the warm-up")
    return {"train": run_train, "compare": run_compare, "sample": run_sample}[options.pop("command")](options)


def run_train(options: dict) -> int:
    """One training run on the ranks of the launch."""
    options["numerics"] = options["numerics"] or TrainOptions.numerics
    train(TrainOptions(**options))
    return 0


def run_compare(options: dict) -> int:
    """Three training runs and their comparison; 1 if the trained models differ in any bit."""
    ranks, out = options.pop("ranks"), options.pop("out").resolve()
    # From 3 ranks on only the ring adds in Gloo's order; with 2 there is only one order.
    options["numerics"] = options["numerics"] or ("rank_order" if ranks <= 2 else "ring")
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    if not compare(ranks, out, arguments):
        print("the trained models differ", file=sys.stderr)
        return 1
    return 0


def run_sample(options: dict) -> int:
    """Text and validation loss of a checkpoint's model, in this one process."""
    model = load(options["checkpoint"])
    print(f"validation loss {validation_loss(model, load_text()[1]):.6f}\n")
    generator = torch.Generator().manual_seed(0)
    print(decode(model.generate(encode(options["prompt"])[None], options["length"], generator)[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
