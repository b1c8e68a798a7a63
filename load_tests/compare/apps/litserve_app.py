"""The model on LitServe, with its dynamic batching. `COMPARE_PORT` says where."""

import os
from typing import Any

import litserve

from load_tests.compare.apps.onnx_model import OnnxModel, Options


class SentimentAPI(litserve.LitAPI):
    """Texts to labels. LitServe gives `predict` a list where the batch may hold more than one."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe's signature
        """Load the model, in each worker."""
        options = Options.read()
        self._model = OnnxModel(options)
        self._batched = options.batch > 1

    def decode_request(self, request: dict[str, str]) -> str:
        """The text of a body."""
        return request["text"]

    def predict(self, inputs: Any) -> Any:
        """The answer of each text, in order."""
        answers = self._model.predict(inputs if self._batched else [inputs])
        return answers if self._batched else answers[0]

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        """The answer goes out as it is."""
        return output


def main() -> None:
    """Serve until a signal."""
    options = Options.read()
    batching: dict[str, Any] = (
        {"max_batch_size": options.batch, "batch_timeout": options.wait_ms / 1000}
        if options.batch > 1
        else {}
    )
    server = litserve.LitServer(
        SentimentAPI(**batching),
        accelerator="cpu",
        workers_per_device=options.workers,
        timeout=120,
        fast_queue=options.tuned,
    )
    server.run(
        host="127.0.0.1",
        port=int(os.environ["COMPARE_PORT"]),
        generate_client_file=False,
        # Its default is one for each worker, which take the cores from the workers.
        num_api_servers=1 if options.tuned else None,
        log_level="warning" if options.tuned else "info",
    )


if __name__ == "__main__":
    main()
