// The texts of messages and labels, in the page's language. A message from a node is an id with parameters.
// i18n/<language>.json has the text of each id and the labels of settings; a text that is missing there is English.
import { app } from "../../scripts/app.js"

const LANGUAGES = ["en", "es", "fr", "ja", "ko", "pt-BR", "ru", "zh", "zh-TW"]
const tables = new Map()
let table = { labels: {}, messages: {} }

async function loaded(language) {
  if (!tables.has(language)) {
    const file = fetch(new URL(`i18n/${language}.json`, import.meta.url))
    tables.set(language, file.then((response) => response.json()).catch(() => ({})))
  }
  return tables.get(language)
}

export function pageLanguage() {
  return app.extensionManager?.setting?.get("Comfy.Locale")
}

export async function loadTexts() {
  const language = pageLanguage()
  const [english, theirs] = await Promise.all([loaded("en"), loaded(LANGUAGES.includes(language) ? language : "en")])
  table = {
    labels: { ...english.labels, ...theirs.labels },
    messages: { ...english.messages, ...theirs.messages },
  }
}

// Fills the placeholders of a text: {name}, {name:.2f} with two decimals, {label.ratio} by the label of a setting.
export function formatted(message, node) {
  if (typeof message === "string") return message
  const { id, params = {} } = message
  return (table.messages[id] ?? id).replace(/\{([\w.]+)(?::\.(\d)f)?\}/g, (_, name, decimals) => {
    if (name.startsWith("label.")) return labelOf(node, name.slice(6))
    const value = params[name]
    if (name === "setting") return labelOf(node, value)
    if (typeof value === "number") return decimals ? value.toFixed(decimals) : String(Number(value.toPrecision(10)))
    if (Array.isArray(value)) return value.map((each) => valueOf(each, node)).join(", ")
    return valueOf(value, node)
  })
}

function valueOf(value, node) {
  return value?.id ? formatted(value, node) : String(value)
}

function labelOf(node, name) {
  const widget = node?.widgets?.find((each) => each.name === name)
  const input = node?.inputs?.find((each) => each.name === name)
  return widget?.label ?? input?.label ?? input?.localized_name ?? table.labels[name] ?? name.replaceAll("_", " ")
}

export function joined(lines, node) {
  return lines.map((line) => formatted(line, node)).join("\n")
}
