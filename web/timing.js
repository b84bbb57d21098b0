// Times the steps of every sampler that runs: those with ToMA, and the same without it.
import { api } from "../../scripts/api.js"

const SKIPPED = new Set(["ToMA", "ToMAAdvanced", "ToMACalibrate"])
const SEEDS = new Set(["seed", "noise_seed", "control_after_generate"])
const prompts = new Map() // prompt id -> its graph, until the prompt is over
const plain = new Map() // what is sampled -> seconds per step of the last run without ToMA
let prompt // the id of the prompt that runs
let executing // the id of the node that runs
let clock // { first, last, steps } of its sampling: times in milliseconds
let merged = [] // messages of runs with ToMA in this node
let changed = () => {} // called when a time is known

// What a sampler samples: it and all nodes before it but ours, with what they are set to but seeds and prompts.
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

// Names of files may have spaces too, and another file is another model.
function isProse(value) {
  return typeof value === "string" && /\s/.test(value) && !/\.\w+$/.test(value)
}

// The first step is left out: what a run does once is in it. The last ends when the next node begins, because a GPU is
// behind what it is told.
function stopped() {
  const graph = prompts.get(prompt)
  if (graph && clock && clock.steps > clock.from && graph[executing]) {
    const seconds = (performance.now() - clock.first) / 1000 / (clock.steps - clock.from)
    const key = sampled(graph, executing)
    const steps = clock.from === 1 ? clock.steps - 1 : Infinity // after the first one
    for (const message of merged) message.timed = { key, seconds, steps, full: message.first_full }
    if (!merged.length) plain.set(key, seconds)
    changed()
  }
  clock = undefined
  merged = []
}

// A run with ToMA has ended: its sampler is the node that runs now.
export function ended(message) {
  merged.push(message)
}

// The line on the times of a run: beside them those of the last run of the same size without ToMA. Where the first step
// was full, leaving it out would flatter a run of few steps: then it counts as long as a step without ToMA.
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
  // ComfyUI's page tells nobody which graph a prompt has.
  const queuePrompt = api.queuePrompt
  api.queuePrompt = async function (number, data, ...more) {
    const answer = await queuePrompt.call(this, number, data, ...more)
    if (answer?.prompt_id && data?.output) prompts.set(answer.prompt_id, data.output)
    return answer
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
  // What runs while the page has no connection is not seen, and on its return ComfyUI names the node again.
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
