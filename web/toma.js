// Shows on the nodes of this pack what they did and what went wrong, in the page's language. ComfyUI's own widgets draw
// it, so it works in both renderers.
import { api } from "../../scripts/api.js"
import { app } from "../../scripts/app.js"
import de from "./said/de.mjs"
import en from "./said/en.mjs"
import es from "./said/es.mjs"
import fr from "./said/fr.mjs"
import ja from "./said/ja.mjs"
import ko from "./said/ko.mjs"
import ru from "./said/ru.mjs"
import zh from "./said/zh.mjs"

// Node type -> least and greatest height of its text, in pixels: whole lines of 16, and 8 around them.
const LINE = [56, 88]
const REPORT = [120, 184]
const HEIGHTS = { ToMA: LINE, ToMAAdvanced: LINE, ToMAReport: REPORT, ToMABenchmark: REPORT, ToMACalibrate: REPORT }
// A new node of these is as large as its picture needs to be read.
const SIZES = { ToMAReport: [480, 1180], ToMABenchmark: [460, 840], ToMACalibrate: [460, 860] }
const AROUND = 20 // what the canvas renderer leaves free above and below a widget
const WIDGET = "toma_said"
const NEW = { text: "No run yet." }
const CACHED = { text: "Nothing ran anew: ComfyUI had this result in its cache. Change the seed to see what is merged." }
const WAIT = { milliseconds: 200, times: 100 } // for the server's answer to a prompt

// Workflow id -> node id -> the last message, for workflows that are closed and opened again.
const known = new Map()

// The nodes speak English. said/<language>.mjs has what they say, with {names} in place of what changes.
const LANGUAGES = { de, en, es, fr, ja, ko, ru, zh }
let phrases = []

function learn() {
  const language = LANGUAGES[app.extensionManager?.setting?.get("Comfy.Locale")] ?? en
  phrases = Object.entries(language).map(phrase)
}

function phrase([english, theirs]) {
  const parts = english.split(/\{(\w+)\}/)
  const names = parts.filter((_, index) => index % 2)
  const form = parts.map((part, index) => {
    if (index % 2) return part.length === 1 ? "(-?\\d[\\d.]*)" : "(.+?)" // one letter stands for a number
    return part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")
  })
  return { form: new RegExp(`^${form.join("")}$`), names, theirs }
}

function translated(text, node) {
  for (const { form, names, theirs } of phrases) {
    const found = form.exec(text)
    if (!found) continue
    return theirs.replace(/\{(\w+)\}/g, (_, name) => {
      const part = found[names.indexOf(name) + 1]
      return name === "field" ? labelOf(node, part) : translated(part, node)
    })
  }
  return text
}

function labelOf(node, name) {
  const widget = node?.widgets?.find((each) => each.name === name)
  const input = node?.inputs?.find((each) => each.name === name)
  return widget?.label ?? input?.label ?? input?.localized_name ?? name
}

function inTheirWords(text, node) {
  const lines = text.replace(/^ToMA: /gm, "").split("\n")
  return lines.map((line) => /^\s*/.exec(line)[0] + translated(line.trim(), node)).join("\n")
}

function addText(node) {
  const [least, greatest] = HEIGHTS[node.comfyClass]
  const text = document.createElement("div")
  text.className = "toma-said"
  text.setAttribute("role", "status")
  Object.assign(text.style, {
    boxSizing: "border-box",
    maxHeight: node.comfyClass in SIZES ? "100%" : `min(100%, ${greatest}px)`,
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
  frame.append(text)
  const widget = node.addDOMWidget(WIDGET, WIDGET, frame, {
    serialize: false,
    hideInPanel: true, // the panel of parameters would show an empty field
    getMinHeight: () => least + AROUND,
    getMaxHeight: () => greatest + AROUND,
  })
  widget.serialize = false
  widget.beforeQueued = queued
  write(node, NEW)
}

// Below 0 there is only -1, the preset's value: a click on an arrow leads from it to 0, and back.
function snap(widget) {
  const callback = widget.callback
  let last = widget.value
  widget.callback = function (value, ...more) {
    if (value > -1 && value < 0) value = widget.value = last < 0 ? 0 : -1
    last = value
    return callback?.call(this, value, ...more)
  }
}

// The canvas renderer shows what the Vue renderer folds away; it knows how to fold, and is told of it here.
function fold(node) {
  for (const widget of node.widgets.filter(({ options }) => options?.advanced)) {
    widget.advanced = true
    Object.defineProperty(widget, "hidden", { configurable: true, get: () => !node.showAdvanced, set() {} })
  }
  const [width, height] = SIZES[node.comfyClass] ?? [0, 0]
  node.setSize([Math.max(width, node.size[0]), Math.max(height, node.computeSize()[1])])
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

function write(node, { text, details = "", error = false, earlier = false }) {
  const element = node?.widgets?.find(({ name }) => name === WIDGET)?.element.firstChild
  if (!element) return
  const told = earlier ? text.replace(/\n|$/, (end) => ` (from an earlier run)${end}`) : text // on the first line
  element.textContent = inTheirWords(told, node)
  element.title = inTheirWords(details, node)
  const stripe = error ? "var(--error-text, #f44)" : text.startsWith("Nothing was merged") ? "#c90" : undefined
  element.style.borderLeftColor = stripe ?? "var(--comfy-input-bg)"
  element.classList.toggle("toma-error", error)
}

function openMessages() {
  return [...known].filter(([graph]) => isOpen(graph)).flatMap(([, messages]) => [...messages])
}

function writeAll() {
  for (const [path, message] of openMessages()) write(findNode(path), message)
}

function said(path, message) {
  const { graph } = message
  if (!known.has(graph)) known.set(graph, new Map())
  const messages = known.get(graph)
  const last = messages.get(String(path))
  const before = last?.error ? last.before : last
  messages.set(String(path), message.error ? { ...message, before } : message)
  if (isOpen(graph)) write(findNode(path), message)
}

// A node that ComfyUI takes from its cache, or that is bypassed, says nothing in this run.
function started() {
  for (const [, message] of openMessages()) message.earlier = true
  writeAll()
}

// After the page was loaded anew nothing is known of a run that ComfyUI remembers. The sampler behind a remembered node
// may still run, so this is said when all is over.
let remembered = []
const asked = new Set() // the workflows whose prompts may be running: nobody tells which one a prompt is of

function cached({ detail }) {
  remembered = detail.nodes ?? []
}

function finished() {
  if (asked.size !== 1 || !asked.has(openGraph())) return
  const told = new Set(openMessages().map(([path]) => path))
  for (const path of remembered) if (!told.has(String(path))) write(findNode(path), CACHED)
  remembered = []
}

// The page tells nobody that the server refused a prompt, so its answer is waited for.
let waiting

function queued() {
  asked.add(openGraph())
  for (const [path, { error, before, graph }] of openMessages()) if (error) said(path, before ?? { ...NEW, graph })
  clearTimeout(waiting)
  const look = (times) => {
    const refused = Object.entries(app.lastNodeErrors ?? {})
    for (const [path, { errors }] of refused) {
      if (errors.length && findNode(path)) said(path, { graph: openGraph(), text: sentence(errors[0]), error: true })
    }
    if (!refused.length && times) waiting = setTimeout(look, WAIT.milliseconds, times - 1)
  }
  waiting = setTimeout(look, WAIT.milliseconds, WAIT.times)
}

// ComfyUI's own complaints in the words of ours.
function sentence({ type, message, details = "", extra_info: info = {} }) {
  const name = info.input_name
  const value = JSON.stringify(info.received_value)
  const { min, max, default: usual, options } = info.input_config?.[1] ?? {}
  if (type === "required_input_missing") return `Nothing is connected to ${name}. Connect it.`
  if (type.startsWith("value_") && max !== undefined)
    return `${name} is ${value}. Allowed: a number from ${min} to ${max}. Try ${usual}.`
  if (type === "value_not_in_list" && options)
    return `${name} is ${value}. Allowed: ${options.join(", ")}. Choose one of them.`
  return details.includes("ToMA: ") ? details.slice(details.indexOf("ToMA: ")) : `${message}: ${details}`
}

app.registerExtension({
  name: "toma-token-merge.said",
  setup() {
    learn()
    api.addEventListener("execution_start", started)
    api.addEventListener("execution_cached", cached)
    api.addEventListener("execution_success", finished)
    api.addEventListener("promptQueued", () => asked.add(openGraph()))
    api.addEventListener("status", ({ detail }) => detail?.exec_info?.queue_remaining || asked.clear())
    api.addEventListener("toma.said", ({ detail }) => said(detail.node, detail))
    api.addEventListener("executed", ({ detail }) => {
      const [message] = detail.output?.toma ?? []
      if (message) said(detail.display_node ?? detail.node, message)
    })
  },
  nodeCreated(node) {
    if (!(node.comfyClass in HEIGHTS)) return
    addText(node)
    node.widgets.filter(({ type, options }) => type === "number" && options?.min === -1).forEach(snap)
    fold(node)
  },
  beforeConfigureGraph: learn,
  afterConfigureGraph: writeAll,
})
