"""`valence serve` with an engine whose lanes never come back from onnxruntime; a test starts it as a process.

Warm-up and golden texts go through the engine of the version; only what a lane runs is endless.
"""

import sys
import threading

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime import InferenceSession, SessionOptions

from service.core import FloatArray, TokenBatch
from service.engines import Engine, EngineOptions, open_engine
from service.environment import read_settings
from service.lanes import LANE
from service.logs import configure
from service.server import serve
from service.store import Version


def endless_session() -> InferenceSession:
    """A loop of 10^12 turns, in a session that has a thread of its own."""
    turn = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["x", "one"], ["more"])],
        "turn",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["turns", "", "start"], ["end"], body=turn)],
        "endless",
        [
            helper.make_tensor_value_info("turns", TensorProto.INT64, []),
            helper.make_tensor_value_info("start", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("end", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    options = SessionOptions()
    options.intra_op_num_threads = 2
    return InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Endless:
    """The engine of the version, except in a lane."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._endless = endless_session()
        self.name, self.precision, self.device = engine.name, engine.precision, engine.device
        self.labels, self.max_tokens = engine.labels, engine.max_tokens

    def run(self, batch: TokenBatch) -> FloatArray:
        if threading.current_thread().name.startswith(LANE):
            self._endless.run(None, {"turns": np.array(10**12), "start": np.zeros(1, np.float32)})
        return self._engine.run(batch)

    def close(self) -> None:
        self._engine.close()


def open_endless(version: Version, options: EngineOptions) -> Engine:
    return Endless(open_engine(version, options))


if __name__ == "__main__":
    settings = read_settings()
    configure(settings.log_format, settings.log_level)
    sys.exit(serve(settings, open_engine=open_endless))
