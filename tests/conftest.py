"""What holds for every test.

onnxruntime reports to nobody, which must be said before it is imported. And processes that tests start hear
the signals that the tests send, however the tests were started: what `nohup` ignores is inherited.
"""

import signal

from service.environment import keep_onnxruntime_silent

keep_onnxruntime_silent()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
