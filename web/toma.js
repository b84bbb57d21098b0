// Shows on the nodes of this pack what they did. ComfyUI's own widgets draw it, so it works in both renderers.
import { api } from "../../scripts/api.js"
import { app } from "../../scripts/app.js"

// Node type -> least and greatest height of its text, in pixels: whole lines of 16, and 8 around them.
const LINE = [56, 72]
const REPORT = [88, 168]
const HEIGHTS = { ToMA: LINE, ToMAAdvanced: LINE, ToMAReport: REPORT, ToMABenchmark: REPORT }
const AROUND = 20 // what the canvas renderer leaves free above and below a widget
const WIDGET = "toma_said"

// Workflow id -> node id -> the last text, for workflows that are closed and opened again.
const known = new Map()

function addText(node) {
  const [least, greatest] = HEIGHTS[node.comfyClass]
  const text = document.createElement("div")
  text.className = "toma-said"
  text.setAttribute("role", "status")
  text.textContent = "No run seen yet."
  Object.assign(text.style, {
    boxSizing: "border-box",
    maxHeight: `min(100%, ${greatest}px)`,
    padding: "0 8px",
    border: "solid var(--comfy-input-bg)", // not padding, in which half a line would show when the text is scrolled
    borderWidth: "4px 0",
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
    getMinHeight: () => least + AROUND,
    getMaxHeight: () => greatest + AROUND,
  })
  widget.serialize = false
}

// Ids of nodes in subgraphs are paths: "12:5" is node 5 in the subgraph of node 12.
function findNode(path) {
  let graph = app.rootGraph ?? app.graph
  let node
  for (const id of String(path).split(":")) {
    node = graph?.getNodeById(id)
    graph = node?.subgraph
  }
  return node
}

function isOpen(graph) {
  return !graph || graph === (app.rootGraph ?? app.graph)?.id
}

function textOf(path) {
  return findNode(path)?.widgets?.find(({ name }) => name === WIDGET)?.element.firstChild
}

function show(path, text) {
  const element = textOf(path)
  if (element) Object.assign(element, { textContent: text, title: "" }).style.opacity = 1
}

// A node that ComfyUI takes from its cache, or that is bypassed, says nothing in this run.
function fade(path) {
  const element = textOf(path)
  if (element) Object.assign(element, { title: "from an earlier run" }).style.opacity = 0.5
}

function openTexts() {
  return [...known].filter(([graph]) => isOpen(graph)).flatMap(([, texts]) => [...texts])
}

function said(path, { graph, text }) {
  if (!known.has(graph)) known.set(graph, new Map())
  known.get(graph).set(String(path), text)
  if (isOpen(graph)) show(path, text)
}

app.registerExtension({
  name: "toma-token-merge.said",
  setup() {
    api.addEventListener("execution_start", () => openTexts().forEach(([path]) => fade(path)))
    api.addEventListener("toma.said", ({ detail }) => said(detail.node, detail))
    api.addEventListener("executed", ({ detail }) => {
      const [message] = detail.output?.toma ?? []
      if (message) said(detail.display_node ?? detail.node, message)
    })
  },
  nodeCreated(node) {
    if (node.comfyClass in HEIGHTS) addText(node)
  },
  afterConfigureGraph() {
    for (const [path, text] of openTexts()) show(path, text)
  },
})
