"""What holds for every test: onnxruntime reports to nobody, which must be said before it is imported."""

from service.settings import keep_onnxruntime_silent

keep_onnxruntime_silent()
