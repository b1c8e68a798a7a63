"""A user of locust that waits for its answer before it asks again, to stand beside our own in one run.

Read by locust alone, in a process of its own.
"""

from locust import FastHttpUser, constant_throughput, task

NAME = "closed loop"


class ClosedLoop(FastHttpUser):
    """One user that would ask 50 times a second."""

    fixed_count = 1
    wait_time = constant_throughput(50)

    @task
    def ask(self) -> None:
        self.client.post("/predict", json={"inputs": "quite moving"}, name=NAME)
