"""Train a hand-written network on handwritten digits, on any number of ranks.

    python scripts/train_digits.py                        one process
    mpirun -np 2 python scripts/train_digits.py           two
    mpirun -np 3 python scripts/train_digits.py --verify  three, and show that it changes nothing

All of it is NumPy: two hidden layers, backward by hand, SGD with momentum and a learning rate
that warms up.  The lines that make it run on N processes are marked [hvd].

Every global batch is cut into N equal parts, so that any number of ranks that divides --batch
takes the same steps, up to rounding.  `--verify` trains in float64, lets every rank take the same
steps once more by itself and without hvdlite, and compares the weights.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores: one BLAS thread each

import numpy as np
import numpy.typing as npt

import hvdlite as hvd

Array = npt.NDArray[np.floating]
Params = dict[str, Array]
Batch = tuple[Array, npt.NDArray[np.int64]]
Data = tuple[Array, npt.NDArray[np.int64], Array, npt.NDArray[np.int64]]

LAYERS = (64, 128, 64, 10)  # pixels, two hidden layers, digits
EPOCHS, TARGET = 20, 0.96
TOLERANCE = 1e-10  # of --verify


# --- the data ------------------------------------------------------------------------------------


def load_data(dtype: type[np.floating]) -> Data:
    """1,437 images to train on and 360 to test on, the same on every rank."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        missing = "scikit-learn is missing; type: python -m pip install scikit-learn"
        raise SystemExit(missing if hvd.rank() == 0 else 1) from None
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(dtype)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:360], order[360:]  # 360 test images: 1, 2, 3 and 4 ranks get equal parts
    return images[train], labels[train], images[test], labels[test]


def global_batches(count: int, size: int, seed: int, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of each batch of an epoch, the same on every rank; what is left over is dropped."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    for start in range(0, count - size + 1, size):
        yield order[start : start + size]


# --- the network ---------------------------------------------------------------------------------


def init_params(seed: int, dtype: type[np.floating]) -> Params:
    """Weights and biases by name, "w0" and "b0" for the first layer."""
    rng = np.random.default_rng(seed)
    params: Params = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(LAYERS)):
        params[f"w{i}"] = rng.normal(0, np.sqrt(2 / fan_in), (fan_in, fan_out)).astype(dtype)
        params[f"b{i}"] = np.zeros(fan_out, dtype)
    return params


def forward(params: Params, images: Array) -> list[Array]:
    """The input of every layer, and the logits last."""
    last = len(LAYERS) - 2
    values = [images]
    for i in range(last + 1):
        z = values[-1] @ params[f"w{i}"] + params[f"b{i}"]
        values.append(z if i == last else np.maximum(z, 0))
    return values


def softmax_loss(logits: Array, labels: npt.NDArray[np.int64]) -> tuple[float, Array]:
    """Mean cross-entropy of a batch, and its gradient with respect to the logits."""
    rows = np.arange(len(labels))
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    loss = float(-np.log(probs[rows, labels]).mean())
    probs[rows, labels] -= 1
    return loss, probs / probs.dtype.type(len(labels))


def backward(
    params: Params, values: list[Array], delta: Array, out: Mapping[str, Array]
) -> Iterator[tuple[str, Array]]:
    """Yield (name, gradient), last layer first, each as soon as it is final.

    A gradient whose name is in `out` is written there, the others into new arrays.
    """
    for i in reversed(range(len(LAYERS) - 1)):
        yield f"b{i}", np.sum(delta, axis=0, out=out.get(f"b{i}"))
        yield f"w{i}", np.matmul(values[i].T, delta, out=out.get(f"w{i}"))
        if i > 0:
            delta = (delta @ params[f"w{i}"].T) * (values[i] > 0)


class SGD:
    """Momentum SGD whose learning rate rises linearly over the first steps."""

    momentum, warmup_steps = 0.9, 30

    def __init__(self, params: Params, lr: float) -> None:
        """Start with no velocity; `params` are updated in place."""
        self.params, self.lr = params, lr
        self.velocity = {name: np.zeros_like(p) for name, p in params.items()}
        self.steps = 0

    def step(self, grads: Mapping[str, Array]) -> None:
        """Update the parameters by their gradients, which are only read."""
        self.steps += 1
        lr = self.lr * min(1.0, self.steps / self.warmup_steps)
        for name, grad in grads.items():
            velocity = self.velocity[name]
            velocity *= self.momentum
            velocity += grad
            self.params[name] -= lr * velocity


# --- training ------------------------------------------------------------------------------------


def accuracy_on(params: Params, images: Array, labels: npt.NDArray[np.int64]) -> float:
    """The share of images whose largest logit is at their label."""
    return float((forward(params, images)[-1].argmax(axis=1) == labels).mean())


def train_step(opt: hvd.DistributedOptimizer, params: Params, batch: Batch, views: bool) -> float:
    """One step on this rank's part of a batch; returns its loss."""
    images, labels = batch
    values = forward(params, images)
    loss, delta = softmax_loss(values[-1], labels)
    for name, grad in backward(params, values, delta, opt.grads if views else {}):
        if views:
            opt.grad_ready(name)  # [hvd] it was computed in place, in the bucket
        else:
            opt.grad_ready(name, grad)  # [hvd] copied; the averaging starts while backward runs
    opt.step()  # waits for the averages, then calls SGD.step with them
    return loss


def train(args: argparse.Namespace, data: Data) -> tuple[Params, float, float]:
    """Train on all ranks; returns the weights, the test accuracy and the samples per second."""
    images, labels, test_images, test_labels = data
    params = init_params(args.seed + hvd.rank(), images.dtype.type)  # rank 0's are broadcast
    opt = hvd.DistributedOptimizer(  # [hvd]
        SGD(params, args.lr), params, gradient_as_bucket_view=args.views
    )
    mine = hvd.shard(len(test_labels), shuffle=False)  # [hvd] this rank's part of the test images
    seconds, samples, accuracy = 0.0, 0, 0.0
    for epoch in range(args.epochs):
        losses = []
        start = time.perf_counter()
        for batch in global_batches(len(images), args.batch, args.seed, epoch):
            part = hvd.shard(batch, shuffle=False)  # [hvd] this rank's part of the batch
            losses.append(train_step(opt, params, (images[part], labels[part]), args.views))
            samples += len(batch)
        seconds += time.perf_counter() - start
        metrics = hvd.average_metrics(  # [hvd]
            {
                "loss": float(np.mean(losses)),
                "accuracy": accuracy_on(params, test_images[mine], test_labels[mine]),
            }
        )
        accuracy = metrics["accuracy"]
        if hvd.rank() == 0:  # [hvd]
            line = f"epoch {epoch + 1:2d}  loss {metrics['loss']:.4f}  test accuracy {accuracy:.4f}"
            print(line, flush=True)
    return params, accuracy, samples / seconds


def train_alone(args: argparse.Namespace, data: Data) -> Params:
    """The same steps in one process, without hvdlite."""
    images, labels, _, _ = data
    params = init_params(args.seed, images.dtype.type)
    opt = SGD(params, args.lr)
    for epoch in range(args.epochs):
        for batch in global_batches(len(images), args.batch, args.seed, epoch):
            values = forward(params, images[batch])
            _, delta = softmax_loss(values[-1], labels[batch])
            opt.step(dict(backward(params, values, delta, {})))
    return params


def verify(params: Params, alone: Params) -> None:
    """Raise unless this rank's weights are those of one process."""
    error = float(np.max([np.abs(params[name] - alone[name]).max() for name in alone]))
    if not error <= TOLERANCE:
        raise AssertionError(
            f"rank {hvd.rank()}: weights differ by {error:.2g} from those of one process, "
            f"more than {TOLERANCE:g}"
        )
    worst = float(hvd.allreduce(np.float64(error), op=hvd.Max))
    if hvd.rank() == 0:
        print(f"verified on every rank: weights within {worst:.1e} of those of one process")


def parse_args() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--batch", type=int, default=96, help="samples, all ranks together")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true", help="compare with one process")
    parser.add_argument("--views", action="store_true", help="compute gradients in the buckets")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {args.epochs}")
    if args.batch < 12 or args.batch % 12 != 0:
        parser.error(f"--batch must be a multiple of 12, so that 1-4 ranks divide it: {args.batch}")
    return args


def main() -> int:
    """Train, report, and tell by the exit code whether the accuracy is what it should be."""
    args = parse_args()
    hvd.init()  # [hvd]
    if args.batch % hvd.size() != 0:
        raise SystemExit(f"--batch {args.batch} is not a multiple of the {hvd.size()} ranks")
    data = load_data(np.float64 if args.verify else np.float32)
    params, accuracy, rate = train(args, data)
    if args.verify:
        verify(params, train_alone(args, data))
    is_good = accuracy >= TARGET or args.epochs < EPOCHS
    if hvd.rank() == 0:
        if not is_good:
            print(f"the accuracy should be at least {TARGET}", file=sys.stderr, flush=True)
        print(f"accuracy {accuracy:.4f}  samples/s {rate:.0f}  ranks {hvd.size()}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
