// Checks custom resources against the schemas of KEDA and of the Prometheus Operator.
// Reads a JSON list of objects from standard input; prints one line for each fault, and ends with 1 if there is any.
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1";
import { PrometheusRule, ServiceMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const kinds = {
  "keda.sh/v1alpha1 ScaledObject": ScaledObject,
  "monitoring.coreos.com/v1 PrometheusRule": PrometheusRule,
  "monitoring.coreos.com/v1 ServiceMonitor": ServiceMonitor,
};

// The validators let unknown fields pass, but look at every field that they know: what they never asked for is mistyped.
function watch(value, path, unread) {
  if (typeof value !== "object" || value === null) return value;
  const seen = Array.isArray(value) ? [] : {};
  for (const [key, inner] of Object.entries(value)) {
    unread.add(`${path}/${key}`);
    const watched = watch(inner, `${path}/${key}`, unread);
    const get = () => (unread.delete(`${path}/${key}`), watched);
    Object.defineProperty(seen, key, { get, enumerable: true });
  }
  return seen;
}

let text = "";
for await (const piece of process.stdin) text += piece;

const faults = [];
for (const one of JSON.parse(text)) {
  const kind = `${one.apiVersion} ${one.kind}`;
  const told = (fault) => faults.push(`${kind} ${one.metadata?.name}: ${fault}`);
  if (!(kind in kinds)) {
    told("no schema is known");
    continue;
  }
  const unread = new Set();
  try {
    const model = new kinds[kind](one);
    model.spec = watch(one.spec, "spec", unread);
    model.validate();
    for (const path of unread) told(`${path} is no field`);
  } catch (error) {
    told(error.message);
  }
}
for (const fault of faults) console.log(fault);
process.exit(faults.length ? 1 : 0);
