#!/usr/bin/env bash
# Proves on V100s that a prepared folder serves what its checkpoint serves, and measures both starts.
#
#   sm70-convert env --acceptance > acceptance.sh
#   bash acceptance.sh MODEL DIR TP_SIZE [more options of vllm serve ...]
#
# MODEL is the checkpoint that DIR was made from. Run it in the environment that serves, with the GPUs free. It starts the runtime
# once to record what it prepares itself (load format sm70_record), then REPEATS times each from MODEL and from DIR, and checks:
#   1. every recorded digest equals the folder's (sm70-convert verify --against): the banks are the same bits;
#   2. the answers to fixed prompts at temperature 0 are the same tokens with the same end;
#   3. (reported) seconds to the first healthy answer, and the peak of GPU memory, of both starts.
# The report is left in $WORK/report.txt. Exit: 0 all equal; 1 something differs; 2 no verdict on 2, since the runtime did not repeat
# its own tokens.
#
# Environment: WORK (folder to make; sm70-acceptance), PORT (8123), REPEATS (2), START_SECONDS (3600), PYTHON (python3).
set -euo pipefail

if [[ $# -lt 3 || $1 == -* ]]; then
  sed -n '2,17s/^#//p' "$0"
  exit 64
fi
model=$1 folder=$2 tp_size=$3
shift 3
options=("$@")
work=${WORK:-sm70-acceptance} port=${PORT:-8123} repeats=${REPEATS:-2} start_seconds=${START_SECONDS:-3600} python=${PYTHON:-python3}
mkdir -p "$(dirname "$work")"
mkdir "$work" || {
  echo "give another WORK: $work exists already" >&2
  exit 73
}
work=$(cd "$work" && pwd)
url=http://127.0.0.1:$port
server='' sampler=''

cat >"$work/client.py" <<'PY'
import json, os, sys, time, urllib.error, urllib.request
from pathlib import Path

PROMPTS = [
    "The capital of France is",
    "Write a short poem about the sea.",
    "def fibonacci(n):\n",
    "Explain in one sentence why the sky is blue.",
    "List the first ten prime numbers:",
    "Übersetze ins Englische: Der Zug hat heute Verspätung.",
    "Q: What is 17 * 23?\nA:",
    "Once upon a time, in a village by a river,",
]


def get(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read()


def wait(url, process, seconds):
    start = time.monotonic()
    while time.monotonic() - start < float(seconds):
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            sys.exit("the server has stopped: see its log")
        try:
            get(f"{url}/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"the server was not ready after {seconds} s: see its log")


def ask(url, out):
    answers = []
    for prompt in PROMPTS:
        body = {"model": "acceptance", "prompt": prompt, "max_tokens": 96, "temperature": 0, "logprobs": 1}
        choice = json.loads(get(f"{url}/v1/completions", body))["choices"][0]
        logprobs = choice["logprobs"]
        answers.append([logprobs["tokens"], choice["finish_reason"], logprobs["token_logprobs"]])
    Path(out).write_text(json.dumps(answers))


def options(check):
    for serve in json.loads(Path(check).read_text())["check"]["serve"]:
        print("\n".join(serve["options"]))


def memory(path):
    peak, last = {}, {}
    for line in Path(path).read_text().splitlines():
        gpu, _, used = line.partition(",")
        if used.strip().isdigit():
            peak[gpu] = max(peak.get(gpu, 0), int(used))
            last[gpu] = int(used)
    return (max(peak.values()), max(last.values())) if peak else ("-", "-")


def report(work, digests):
    work = Path(work)
    print(f"{'start':<12} {'seconds':>8} {'peak MiB':>9} {'ready MiB':>10}   (worst GPU)")
    answers = {"ordinary": [], "prepared": []}
    for name in (work / "starts").read_text().split():
        peak, ready = memory(work / f"{name}.memory")
        print(f"{name:<12} {(work / f'{name}.seconds').read_text().strip():>8} {peak:>9} {ready:>10}")
        kind = name.split("-")[0]
        if kind in answers:
            answers[kind].append(json.loads((work / f"{name}.answers").read_text()))
    differ = unsure = tokens = 0
    worst = 0.0
    for i, prompt in enumerate(PROMPTS):
        ordinary = [run[i] for run in answers["ordinary"]]
        steady = all(a[:2] == ordinary[0][:2] for a in ordinary)
        for run in answers["prepared"]:
            tokens += len(run[i][0])
            same = [a for a in ordinary if a[:2] == run[i][:2]]
            if not same:
                differ, unsure = differ + steady, unsure + (not steady)
                print(f"prompt {i + 1} ({prompt[:30]!r}): {'DIFFERS' if steady else 'differs, as the ordinary starts do'}")
            else:
                worst = max([worst, *(abs(p - q) for p, q in zip(same[0][2], run[i][2]) if p is not None)])
    print(f"digests: {digests}")
    verdict = "DIFFERENT" if differ else "no verdict: the ordinary starts differ among themselves" if unsure else "equal"
    print(f"tokens: {verdict}; {tokens} compared, largest difference of a log-probability {worst:g}")
    sys.exit(1 if differ else 2 if unsure else 0)


{"wait": wait, "ask": ask, "options": options, "report": report}[sys.argv[1]](*sys.argv[2:])
PY

stop() {
  if [[ -n $sampler ]]; then
    kill "$sampler" 2>/dev/null || true
    wait "$sampler" 2>/dev/null || true
  fi
  if [[ -n $server ]]; then
    kill -TERM "$server" 2>/dev/null || true
    for ((i = 0; i < 300; i++)); do
      kill -0 -- "-$server" 2>/dev/null || break
      sleep 0.2
    done
    kill -KILL -- "-$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  server='' sampler=''
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# run NAME MODEL OPTION...: one start from nothing to the last answer
run() {
  local name=$1 from=$2 begin end
  shift 2
  echo "== $name" >&2
  nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits -lms 100 >"$work/$name.memory" &
  sampler=$!
  begin=$(date +%s.%N)
  setsid "$python" -m vllm.entrypoints.openai.api_server --model "$from" --served-model-name acceptance --host 127.0.0.1 \
    --port "$port" --tensor-parallel-size "$tp_size" "$@" >"$work/$name.log" 2>&1 &
  server=$!
  "$python" "$work/client.py" wait "$url" "$server" "$start_seconds"
  end=$(date +%s.%N)
  awk -v a="$begin" -v b="$end" 'BEGIN { printf "%.1f\n", b - a }' >"$work/$name.seconds"
  "$python" "$work/client.py" ask "$url" "$work/$name.answers"
  stop
  echo "$name" >>"$work/starts"
}

sm70-convert env --json >"$work/env.json"
nvidia-smi >"$work/nvidia-smi.txt"
sm70-convert env --check "$folder" --tp-size "$tp_size"
sm70-convert env --check "$folder" --tp-size "$tp_size" --json >"$work/check.json"
while IFS= read -r option; do
  [[ -z $option ]] || options+=("$option")
done < <("$python" "$work/client.py" options "$work/check.json")

run recording "$model" --load-format sm70_record \
  --model-loader-extra-config "{\"record_hashes\": \"$work/recorded\"}" "${options[@]}"
digests=equal status=0
sm70-convert verify "$folder" --against "$work/recorded" || digests=DIFFERENT status=1
for ((repeat = 1; repeat <= repeats; repeat++)); do
  run "ordinary-$repeat" "$model" "${options[@]}"
  run "prepared-$repeat" "$folder" --load-format sm70_prepared "${options[@]}"
done
"$python" "$work/client.py" report "$work" "$digests" | tee "$work/report.txt" || status=$((status ? status : $?))
exit "$status"
