"""What holds for every test: onnxruntime reports to nobody, which must be said before it is imported."""

from service.environment import keep_onnxruntime_silent

keep_onnxruntime_silent()
