"""The model on mosec: one kind of worker, mosec's own dynamic batching. `--port` is read by mosec itself."""

from typing import Any

from mosec import Server, Worker

from load_tests.compare.apps.onnx_model import OnnxModel, Options


class Sentiment(Worker):
    """Texts to labels. mosec gives a list where the batch may hold more than one, and a single body else."""

    def __init__(self) -> None:
        options = Options.read()
        self._model = OnnxModel(options)
        self._batched = options.batch > 1

    def forward(self, data: Any) -> Any:
        """`{"text": …}` in, `{"label": …, "score": …}` out."""
        answers = self._model.predict([body["text"] for body in (data if self._batched else [data])])
        return answers if self._batched else answers[0]


def main() -> None:
    """Serve until a signal."""
    options = Options.read()
    server = Server()
    server.append_worker(
        Sentiment,
        num=options.workers,
        max_batch_size=options.batch,
        max_wait_time=options.wait_ms,
    )
    server.run()


if __name__ == "__main__":
    main()
