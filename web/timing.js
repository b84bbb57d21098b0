// Times the steps of every sampler run, with and without ToMA.
import { api } from "../../scripts/api.js"

const SKIPPED = new Set(["ToMA", "ToMAAdvanced", "ToMACalibrate"])
const SEEDS = new Set(["seed", "noise_seed", "control_after_generate"])
const prompts = new Map() // prompt id -> its graph, until the prompt is over
const plain = new Map() // key of `sampled` -> seconds per step of the last run without ToMA
let prompt // the id of the prompt that runs
let executing // the id of the node that runs
let clock // { first, from, steps } of the executing sampler: milliseconds and step of its first report, last step
let merged = [] // messages of runs with ToMA in the node that runs
let changed = () => {} // called when a time is known

// Returns a key by which runs with and without ToMA are compared: the sampler and all nodes before it except this
// pack's, with their inputs except seeds and prompts.
function sampled(graph, id) {
  const seen = new Set()
  const walk = (node) => {
    const { class_type: type, inputs = {} } = graph[node] ?? {}
    if (!type || seen.has(node)) return
    seen.add(node)
    for (const value of Object.values(inputs)) if (isLink(value)) walk(String(value[0]))
  }
  walk(String(id))
  const described = [...seen].map((node) => {
    const { class_type: type, inputs = {} } = graph[node]
    const set = Object.entries(inputs).filter(([name, value]) => !isLink(value) && !SEEDS.has(name) && !isProse(value))
    return SKIPPED.has(type) ? "" : type + JSON.stringify(set.sort(([a], [b]) => (a < b ? -1 : 1)))
  })
  return described.filter(Boolean).sort().join("\n")
}

function isLink(value) {
  return Array.isArray(value) && value.length === 2 && typeof value[1] === "number"
}

// Takes a text with spaces for a prompt, unless it ends like a file name, which may be that of the model.
function isProse(value) {
  return typeof value === "string" && /\s/.test(value) && !/\.\w+$/.test(value)
}

// Notes the time per step when a node has ended. The first step is excluded, because it contains one-time work. The last
// step ends when the next node begins, because a GPU runs asynchronously.
function stopped() {
  const graph = prompts.get(prompt)
  if (graph && clock && clock.steps > clock.from && graph[executing]) {
    const seconds = (performance.now() - clock.first) / 1000 / (clock.steps - clock.from)
    const key = sampled(graph, executing)
    const steps = clock.from === 1 ? clock.steps - 1 : Infinity // timed steps; Infinity if the first step was not seen
    for (const message of merged) message.timed = { key, seconds, steps, full: message.first_full }
    if (!merged.length) plain.set(key, seconds)
    changed()
  }
  clock = undefined
  merged = []
}

// Called at the end of a run with ToMA, while its sampler is still the executing node.
export function ended(message) {
  merged.push(message)
}

// Returns the line with a run's seconds per step, and with those of the last run without ToMA that has the same key. If
// the first step was full, it counts as a step without ToMA, because excluding it would flatter a run of few steps.
export function timesOf({ timed }) {
  if (!timed) return []
  const without = plain.get(timed.key)
  if (!without) return [{ id: "step_time", params: { seconds: shown(timed.seconds) } }]
  const seconds = timed.seconds + (timed.full ? (without - timed.seconds) / (timed.steps + 1) : 0)
  const params = { seconds: shown(seconds), without: shown(without), times: without / seconds }
  return [{ id: "step_times", params }]
}

function shown(seconds) {
  return seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)
}

export function startTiming(onChange) {
  changed = onChange
  // Wrap `queuePrompt` to get the graph of a prompt, because no event of ComfyUI's page has it.
  const queuePrompt = api.queuePrompt
  api.queuePrompt = async function (number, data, ...more) {
    const response = await queuePrompt.call(this, number, data, ...more)
    if (response?.prompt_id && data?.output) prompts.set(response.prompt_id, data.output)
    return response
  }
  api.addEventListener("execution_start", ({ detail }) => {
    prompt = detail.prompt_id
    executing = undefined
  })
  api.addEventListener("executing", ({ detail }) => {
    stopped()
    executing = detail?.node ?? detail
  })
  api.addEventListener("progress", ({ detail: { value, node } }) => {
    if (node !== undefined && String(node) !== String(executing)) return
    if (!clock || value < clock.steps) clock = { first: performance.now(), from: value, steps: value }
    clock.steps = value
  })
  // Stop timing when the connection is lost, because the page then misses steps.
  api.addEventListener("reconnecting", () => {
    clock = undefined
  })
  api.addEventListener("status", ({ detail }) => detail?.exec_info?.queue_remaining === 0 && prompts.clear())
  for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
    api.addEventListener(kind, ({ detail }) => {
      if (kind === "execution_success") stopped()
      clock = undefined
      merged = []
      prompts.delete(detail?.prompt_id)
    })
}
