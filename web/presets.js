// Shows "preset (4)" in the fields of ToMA Advanced that are left to the preset, in place of their value, -1.
import { app } from "../../scripts/app.js"
import { formatted } from "./texts.js"

const RESET = "toma_reset"
const SWITCH = { true: "on", false: "off" }
const known = new WeakMap() // node -> the preset of its last run, and the preset's values for the model of that run
const nodes = new Set()
const style = document.createElement("style")

function isOverride({ options }) {
  return options?.min === -1 || options?.values?.includes?.("preset")
}

function isLeft({ value }) {
  return value === -1 || value === "preset"
}

// Returns "preset (4)" or, before a run reveals the model, "preset (0 / 4)": the values for UNets and for transformers.
function presetText(node, widget) {
  const preset = node.widgets.find(({ name }) => name === "preset")?.value
  const ran = known.get(node)
  const inputs = node.constructor.nodeData?.input ?? {}
  const [, config] = inputs.required?.[widget.name] ?? inputs.optional?.[widget.name] ?? []
  const values = ran?.preset === preset && widget.name in ran ? [ran[widget.name]] : config?.presets?.[preset] ?? []
  const value = values.map((each) => SWITCH[each] ?? each).join(" / ")
  return value ? formatted({ id: "preset_value", params: { value } }, node) : undefined
}

// Makes the arrows of a widget step from -1, which stands for the preset's value, to 0, and from 0 to -1.
function snap(widget) {
  const callback = widget.callback
  let last = widget.value
  widget.callback = function (value, ...more) {
    if (value > -1 && value < 0) value = widget.value = last < 0 ? 0 : -1
    last = value
    return callback?.call(this, value, ...more)
  }
}

// Replaces a number widget's `_displayValue`, which is what the canvas renderer draws.
function showInCanvas(node, widget) {
  const shown = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(widget), "_displayValue")
  if (!shown) return // a page without this property shows -1
  const get = () => (isLeft(widget) && presetText(node, widget)) || shown.get.call(widget)
  Object.defineProperty(widget, "_displayValue", { configurable: true, get })
}

// Hides the -1 of fields that are not being edited behind a text: the Vue renderer has no `_displayValue`.
export function showInPage() {
  const rules = []
  for (const node of nodes) {
    if (!node.graph) continue
    for (const widget of node.widgets.filter((each) => each.type === "number" && isOverride(each))) {
      const text = presetText(node, widget)
      const field = `[data-node-id="${node.id}"] [aria-label="${widget.name}"]`
      const left = `${field} div:has(> input[aria-valuenow="-1"]:not(:focus))`
      if (text) rules.push(`${left} > input { color: transparent }`, `${left}::after { content: ${JSON.stringify(text)} }`)
      if (text) rules.push(`${left}::after { position: absolute; inset: 0; padding: 4px; pointer-events: none }`)
    }
  }
  style.textContent = rules.join("\n")
}

// Shows the values that the preset had in the last run.
export function showPreset(node, preset) {
  known.set(node, preset)
  showInPage()
  node.setDirtyCanvas?.(true, true)
}

// Adds a button that leaves every field to the preset; ratio, preset and profile do not change.
function addReset(node) {
  const reset = () => {
    for (const widget of node.widgets.filter(isOverride)) {
      widget.value = widget.options.min === -1 ? -1 : "preset"
      widget.callback?.(widget.value)
    }
    node.setDirtyCanvas?.(true, true)
  }
  const button = node.addWidget("button", RESET, null, reset, { serialize: false, advanced: true, hideInPanel: true })
  button.serialize = false
  button.label = formatted({ id: "reset" }, node)
}

export function addPresets(node) {
  nodes.add(node)
  for (const widget of node.widgets.filter(isOverride)) {
    if (widget.type === "number") {
      snap(widget)
      showInCanvas(node, widget)
    } else widget.options.getOptionLabel = (value) => (value === "preset" && presetText(node, widget)) || value
  }
  addReset(node)
  const preset = node.widgets.find(({ name }) => name === "preset")
  const callback = preset.callback
  preset.callback = function (...values) {
    const result = callback?.apply(this, values)
    showInPage()
    return result
  }
  const removed = node.onRemoved
  node.onRemoved = function (...args) {
    nodes.delete(node)
    return removed?.apply(this, args)
  }
}

document.head.append(style)
