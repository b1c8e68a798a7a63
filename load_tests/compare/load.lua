-- wrk script: POSTs the lines of a file, one body a request, in turns; prints one line of JSON at the end.
-- The requests are made before the first is sent, and no answer is read here: the generator stays cheap.
--   wrk … -s load.lua URL -- FILE

local requests = {}
local last = 0

function init(args)
  local headers = { ["Content-Type"] = "application/json" }
  for body in io.lines(args[1]) do
    requests[#requests + 1] = wrk.format("POST", nil, headers, body)
  end
end

function request()
  last = last % #requests + 1
  return requests[last]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    '\nRESULT {"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "not_200": %d, "lost": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
