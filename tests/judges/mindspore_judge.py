"""Lets MindSpore compile a small GPT with strategy files loaded, and save its strategies; runs in its environment.

Reads ``{"files", "layers"}`` from stdin, each file with its number of devices. Its last line is a JSON object with what
MindSpore did with each file (``strategies`` by operator, and ``refused``, empty where it took it), and its ``version``.
Ranks are simulated.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"GLOG_v": "4"}  # no words of the compiler's own
import mindspore
import numpy as np
from mindspore import context, nn, ops
from mindspore._c_expression import AutoParallelContext, MSContext
from mindspore.common.api import _cell_graph_executor

WIDTH, HEADS, LENGTH, WORDS, BATCH = 128, 4, 64, 256, 16


class Attention(nn.Cell):
    """Attention over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH)
        self.output = nn.Dense(WIDTH, WIDTH)
        self.scores, self.mixed = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.softmax, self.turn, self.reshape = ops.Softmax(), ops.Transpose(), ops.Reshape()

    def heads(self, tokens: Any) -> Any:
        """Tokens of each head."""
        return self.turn(self.reshape(tokens, (BATCH, LENGTH, HEADS, WIDTH // HEADS)), (0, 2, 1, 3))

    def construct(self, tokens: Any) -> Any:
        """What each token takes from the others."""
        shares = self.softmax(self.scores(self.heads(self.query(tokens)), self.heads(self.key(tokens))))
        mixed = self.turn(self.mixed(shares, self.heads(self.value(tokens))), (0, 2, 1, 3))
        return self.output(self.reshape(mixed, (BATCH, LENGTH, WIDTH)))


class Block(nn.Cell):
    """Attention, then a product to four times the width and back."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm((WIDTH,)), Attention()
        self.feed_forward_norm = nn.LayerNorm((WIDTH,))
        self.expand, self.contract, self.gelu = nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH), ops.GeLU()

    def construct(self, tokens: Any) -> Any:
        """Tokens of the next block."""
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.contract(self.gelu(self.expand(self.feed_forward_norm(tokens))))


class Network(nn.Cell):
    """The layers of zoo:gpt2-tiny, under the same names."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.places = mindspore.Tensor(np.arange(LENGTH), mindspore.int32)
        self.blocks, self.norm = nn.CellList([Block() for _ in range(layers)]), nn.LayerNorm((WIDTH,))
        self.head = ops.MatMul(transpose_b=True)

    def construct(self, tokens: Any) -> Any:
        """Scores of every word behind every token."""
        found = self.token_embedding(tokens) + self.position_embedding(self.places)
        for block in self.blocks:
            found = block(found)
        return self.head(self.norm(found).reshape((BATCH * LENGTH, WIDTH)), self.token_embedding.embedding_table)


def name_ascend() -> None:
    """Plan for Ascend without one: only that target has a communication library to plan for.

    MindSpore asks a function of its own whether the target's library is there; without the function it does not ask.
    """
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    core = ctypes.CDLL(str(Path(mindspore.__file__).parent / "lib" / "libmindspore_core.so"))
    asks = (ctypes.c_char * 32).in_dll(core, "_ZN9mindspore9MsContext6seter_E")
    ctypes.memset(ctypes.addressof(asks), 0, len(asks))
    MSContext.get_instance().set_device_target_inner("Ascend")


def judged(file: str, devices: int, layers: int) -> dict[str, Any]:
    """Compile as far as the graph of rank 0, which executes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved.json"
        context.reset_auto_parallel_context()
        context.set_auto_parallel_context(
            device_num=devices,
            global_rank=0,
            full_batch=True,
            parallel_mode="auto_parallel",
            search_mode="sharding_propagation",
            strategy_ckpt_config={"load_file": file, "save_file": str(saved), "only_trainable_params": False},
        )
        AutoParallelContext.get_instance().set_hccl_test_avaible(True)  # ranks are counted, not asked for
        network = Network(layers)
        network.set_train()
        tokens = mindspore.Tensor(np.zeros((BATCH, LENGTH)), mindspore.int32)
        try:
            _cell_graph_executor.compile(network, tokens, phase="export.mindir")
        except Exception as error:  # noqa: BLE001 - whatever MindSpore raises is its verdict
            return {"strategies": {}, "refused": f"{type(error).__name__}: {error}"[:500]}
        return {"strategies": json.loads(saved.read_text())["parallel_strategy_item"], "refused": ""}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        name_ascend()
        found = [judged(file, devices, asked["layers"]) for file, devices in asked["files"]]
    sys.stdout.write("\n" + json.dumps({"found": found, "version": f"mindspore {mindspore.__version__}"}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # there is no device to let go of
