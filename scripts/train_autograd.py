"""Train on handwritten digits with HIPS autograd: `mpirun -np 2 python scripts/train_autograd.py`.

Needs `pip install autograd scikit-learn`.  The lines marked [hvd] make it run on N processes.
"""

# ruff: noqa: D103 - the names say it

import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores: one BLAS thread each

import autograd.numpy as np
from autograd import grad
from sklearn.datasets import load_digits

import hvdlite as hvd

EPOCHS, BATCH, LR, MOMENTUM, WARMUP = 20, 96, 0.1, 0.9, 30
SIZES = {"w0": (64, 128), "b0": 128, "w1": (128, 64), "b1": 64, "w2": (64, 10), "b2": 10}


def logits(params, x):
    h = np.maximum(np.dot(x / 16, params["w0"]) + params["b0"], 0)
    h = np.maximum(np.dot(h, params["w1"]) + params["b1"], 0)
    return np.dot(h, params["w2"]) + params["b2"]


def loss(params, x, y):
    z = logits(params, x)
    z = z - np.max(z, axis=1, keepdims=True)
    return np.mean(np.log(np.sum(np.exp(z), axis=1)) - z[np.arange(len(y)), y])


def sgd(grads):
    for name, g in grads.items():
        velocity[name] = MOMENTUM * velocity[name] + g
        params[name] -= LR * min(1, step / WARMUP) * velocity[name]


hvd.init()  # [hvd]
images, labels = load_digits(return_X_y=True)
test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [360])
rng = np.random.default_rng(hvd.rank())  # differs on purpose: rank 0's weights are broadcast
params = {n: rng.normal(0, 0.12 if n[0] == "w" else 0, size) for n, size in SIZES.items()}
velocity, step = {n: np.zeros_like(p) for n, p in params.items()}, 0
opt = hvd.DistributedOptimizer(sgd, params)  # [hvd]
gradient, local, start = grad(loss), BATCH // hvd.size(), time.perf_counter()  # [hvd]
for epoch in range(EPOCHS):
    mine = hvd.shard(train, epoch=epoch)  # [hvd] this rank's part, another order in each epoch
    for i in range(0, len(mine) - local + 1, local):
        part, step = mine[i : i + local], step + 1
        opt.step(gradient(params, images[part], labels[part]))  # [hvd] averages, then calls sgd
rate = step * local * hvd.size() / (time.perf_counter() - start)
accuracy = np.mean(np.argmax(logits(params, images[test]), axis=1) == labels[test])
if hvd.rank() == 0:  # [hvd]
    print(f"accuracy {accuracy:.4f}  samples/s {rate:.0f}  ranks {hvd.size()}", flush=True)
sys.exit(0 if accuracy >= 0.96 else 1)
