// Shows the status and the errors of this pack's nodes on the nodes, in the page's language. The text is a widget of
// ComfyUI, so it works in both renderers.
import { api } from "../../scripts/api.js"
import { app } from "../../scripts/app.js"
import { translateNotes } from "./notes.js"
import { addPresets, showInPage, showPreset } from "./presets.js"
import { formatted, joined, loadTexts } from "./texts.js"
import { ended, startTiming, timesOf } from "./timing.js"
// Node type -> minimum and maximum height of its text, in pixels: a multiple of 16 for the lines, plus 8.
const LINE = [72, 120]
const REPORT = [184, 264]
const RESULT = [120, 184]
const HEIGHTS = { ToMA: LINE, ToMAAdvanced: LINE, ToMAReport: REPORT, ToMABenchmark: RESULT, ToMACalibrate: RESULT }
// Sizes of nodes with a picture, large enough to read it. Before their first run these nodes are small.
const SIZES = { ToMAReport: [480, 1000], ToMABenchmark: [460, 640], ToMACalibrate: [460, 560] }
const MARGIN = 20 // space that the canvas renderer leaves above and below a widget
const WIDGET = "toma_status"
const NO_RUN = {
  ToMAReport: { id: "report_to_do" },
  ToMABenchmark: { id: "benchmark_to_do" },
  ToMACalibrate: { id: "calibrate_to_do" },
}
const CACHED = { lines: [{ id: "cached" }] }
const WAIT = { milliseconds: 200, times: 100 } // between two looks for the errors of a prompt, and how often

// Workflow id -> node id -> the node's last message, also for closed workflows, which may be opened again.
const lastMessages = new Map()

// The Vue renderer gives text and picture half of a node each; with this style the picture gets all that the text leaves.
const STYLE = ".lg-node-widgets:has(.toma-above) { flex: 0 1 auto !important }"

function addText(node) {
  const [least, greatest] = HEIGHTS[node.comfyClass]
  const text = document.createElement("div")
  text.className = node.comfyClass in SIZES ? "toma-status toma-above" : "toma-status"
  text.setAttribute("role", "status")
  Object.assign(text.style, {
    boxSizing: "border-box",
    minHeight: "0",
    maxHeight: `${greatest}px`,
    padding: "0 8px",
    border: "solid var(--comfy-input-bg)", // not padding, in which half a line would show when the text is scrolled
    borderWidth: "4px 0 4px 4px",
    borderRadius: "4px",
    color: "var(--input-text)",
    background: "var(--comfy-input-bg)",
    font: "12px/16px sans-serif",
    textAlign: "left",
    whiteSpace: "pre-wrap",
    overflowWrap: "anywhere",
    overflow: "auto",
    userSelect: "text",
  })
  const frame = document.createElement("div")
  Object.assign(frame.style, { display: "flex", flexDirection: "column", maxHeight: "100%" })
  frame.append(text)
  const widget = node.addDOMWidget(WIDGET, WIDGET, frame, {
    serialize: false,
    hideInPanel: true, // else the panel of parameters shows an empty field
    getMinHeight: () => least + MARGIN,
    getMaxHeight: () => greatest + MARGIN,
  })
  widget.serialize = false
  widget.beforeQueued = queued
  write(node, newMessage(node))
}

function newMessage(node) {
  return { lines: [NO_RUN[node?.comfyClass] ?? { id: "no_run_yet" }] }
}

// The Vue renderer hides advanced widgets by itself; the canvas renderer needs a `hidden` property.
function hideAdvanced(node) {
  for (const widget of node.widgets.filter(({ options }) => options?.advanced)) {
    widget.advanced = true
    Object.defineProperty(widget, "hidden", { configurable: true, get: () => !node.showAdvanced, set() {} })
  }
  const [width] = SIZES[node.comfyClass] ?? [0]
  node.setSize([Math.max(width, node.size[0]), node.computeSize()[1]])
}

// A node grows for its first picture only; afterwards the user decides its size.
const grown = new WeakSet()

function grow(node) {
  if (!(node?.comfyClass in SIZES) || grown.has(node)) return
  grown.add(node)
  const [width, height] = SIZES[node.comfyClass]
  node.setSize([Math.max(width, node.size[0]), Math.max(height, node.size[1])])
  node.setDirtyCanvas?.(true, true)
}

// Ids of nodes in subgraphs are paths: "12:5" is node 5 in the subgraph of node 12.
function findNode(path) {
  let graph = app.rootGraph ?? app.graph
  let node
  for (const id of String(path).split(":")) {
    node = graph?.getNodeById(id)
    graph = node?.subgraph
  }
  return node?.comfyClass in HEIGHTS ? node : undefined
}

function openGraph() {
  return (app.rootGraph ?? app.graph)?.id
}

function isOpen(graph) {
  return !graph || graph === openGraph()
}

function write(node, message) {
  const { lines, more = [], error = false, earlier = false, preset } = message
  const element = node?.widgets?.find(({ name }) => name === WIDGET)?.element.firstChild
  if (!element) return
  const [first, ...others] = lines
  const head = earlier ? { id: "earlier", params: { line: first } } : first
  element.textContent = joined([head, ...others, ...timesOf(message)], node)
  element.title = error ? "" : joined(more, node)
  if (error && more.length) element.append(folded(more, node))
  const verdict = first.id === "sentence" ? first.params.sentence : first
  const stripe = error ? "var(--error-text, #f44)" : verdict.id === "nothing_merged" ? "#c90" : undefined
  element.style.borderLeftColor = stripe ?? "var(--comfy-input-bg)"
  element.classList.toggle("toma-error", error)
  if (preset && node.comfyClass === "ToMAAdvanced") showPreset(node, preset)
}

// Returns an element with the details of an error, under a line that unfolds them.
function folded(lines, node) {
  const details = document.createElement("details")
  const title = document.createElement("summary")
  title.textContent = formatted({ id: "more" }, node)
  details.append(title, joined(lines, node))
  return details
}

function openMessages() {
  return [...lastMessages].filter(([graph]) => isOpen(graph)).flatMap(([, messages]) => [...messages])
}

function writeAll() {
  for (const [path, message] of openMessages()) write(findNode(path), message)
}

function showMessage(path, message) {
  const { graph } = message
  if (!lastMessages.has(graph)) lastMessages.set(graph, new Map())
  const messages = lastMessages.get(graph)
  const last = messages.get(String(path))
  const before = last?.error ? last.before : last
  messages.set(String(path), message.error ? { ...message, before } : message)
  if (isOpen(graph)) write(findNode(path), message)
}

// Marks all messages as those of an earlier run, because nodes that are cached or bypassed send no message in this run.
function started() {
  for (const [, message] of openMessages()) message.earlier = true
  writeAll()
}

// After a reload the page has no message of nodes that ComfyUI takes from its cache. The sampler or the benchmark behind
// such a node may still run, so the page marks cached nodes only after a prompt in which no node showed progress.
let cachedNodes = []
let progressed = false
const pendingGraphs = new Set() // workflows whose prompts may be running: events do not name the workflow

function cached({ detail }) {
  cachedNodes = detail.nodes ?? []
  progressed = false
}

function finished() {
  if (progressed || pendingGraphs.size !== 1 || !pendingGraphs.has(openGraph())) return
  const withMessage = new Set(openMessages().map(([path]) => path))
  for (const path of cachedNodes) if (!withMessage.has(String(path))) write(findNode(path), CACHED)
  cachedNodes = []
}

// No event reports that the server refused a prompt, so the page polls for the prompt's errors.
let waiting

function queued() {
  pendingGraphs.add(openGraph())
  for (const [path, { error, before, graph }] of openMessages()) if (error) showMessage(path, before ?? { ...newMessage(findNode(path)), graph })
  clearTimeout(waiting)
  const poll = (times) => {
    const refused = Object.entries(app.lastNodeErrors ?? {})
    for (const [path, { errors }] of refused) {
      const node = findNode(path)
      if (node) narrow(errors, node)
      if (errors.length && node)
        showMessage(path, { graph: openGraph(), lines: [complaint(errors[0], node)], error: true })
    }
    if (!refused.length && times) waiting = setTimeout(poll, WAIT.milliseconds, times - 1)
  }
  waiting = setTimeout(poll, WAIT.milliseconds, WAIT.times)
}

// Removes errors from inputs that are not faulty: ComfyUI reports an error of this pack at every input that was checked,
// but the error's text names only the faulty ones.
function narrow(errors, node) {
  const isOther = ({ type, details = "", extra_info: info = {} }) => {
    const label = String(info.input_name).replaceAll("_", " ")
    return type === "custom_validation_failed" && !details.split(" - ").slice(1).join(" - ").toLowerCase().includes(label)
  }
  const others = errors.filter(isOther)
  if (!others.length || others.length === errors.length) return
  errors.splice(0, errors.length, ...errors.filter((error) => !isOther(error)))
  const names = new Set(others.map(({ extra_info: info }) => info.input_name))
  for (const input of node.inputs ?? []) if (names.has(input.name)) input.hasErrors = false
}

// Returns a message for an error of ComfyUI's or this pack's validation.
function complaint({ type, message, details = "", extra_info: info = {} }, node) {
  const setting = info.input_name
  const entered = (name) => node.widgets?.find((widget) => widget.name === name)?.value
  const value = JSON.stringify(info.received_value ?? entered(setting))
  if (type === "required_input_missing") return { id: "not_connected", params: { setting } }
  const inputs = node.constructor.nodeData?.input ?? {}
  const config = info.input_config ?? inputs.required?.[setting] ?? inputs.optional?.[setting]
  const { options, limits } = config?.[1] ?? {}
  const [min, max, usual] = limits ?? [config?.[1]?.min, config?.[1]?.max, config?.[1]?.default]
  const kind = { id: config?.[0] === "INT" ? "a_whole_number" : "a_number" }
  if (type === "value_not_in_list" && options)
    return { id: "not_a_choice", params: { setting, value, choices: options } }
  const custom = type === "custom_validation_failed"
  if (custom && details.includes("tart percent (") && ["start_percent", "end_percent"].includes(setting))
    return { id: "start_after_end", params: { start: entered("start_percent"), end: entered("end_percent") } }
  if (custom && setting === "ratio" && entered(setting) === 0) return { id: "nothing_to_measure" }
  if (custom && setting === "full_step_interval" && entered(setting) === 1) return { id: "full_step_interval_one" }
  if ((custom || type.startsWith("value_")) && max !== undefined)
    return { id: "out_of_range", params: { setting, value, kind, low: min, high: max, usual } }
  return details.includes("ToMA: ") ? details.slice(details.indexOf("ToMA: ") + 6) : `${message}: ${details}`
}

app.registerExtension({
  name: "toma-token-merge.status",
  async setup() {
    document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))
    await loadTexts()
    startTiming(writeAll)
    api.addEventListener("execution_start", started)
    api.addEventListener("execution_cached", cached)
    api.addEventListener("progress", () => (progressed = true))
    api.addEventListener("execution_success", finished)
    api.addEventListener("promptQueued", () => pendingGraphs.add(openGraph()))
    api.addEventListener("status", ({ detail }) => detail?.exec_info?.queue_remaining || pendingGraphs.clear())
    api.addEventListener("toma.said", ({ detail }) => {
      if (detail.run) ended(detail)
      showMessage(detail.node, detail)
    })
    api.addEventListener("executed", ({ detail }) => {
      const [message] = detail.output?.toma ?? []
      if (!message) return
      const path = detail.display_node ?? detail.node
      showMessage(path, message)
      if (detail.output.images && isOpen(message.graph)) grow(findNode(path))
    })
  },
  nodeCreated(node) {
    if (!(node.comfyClass in HEIGHTS)) return
    addText(node)
    if (node.comfyClass === "ToMAAdvanced") addPresets(node)
    hideAdvanced(node)
  },
  beforeConfigureGraph: loadTexts,
  afterConfigureGraph() {
    translateNotes()
    writeAll()
    showInPage()
  },
})
