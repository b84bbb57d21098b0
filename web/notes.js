// Shows the notes of templates in the page's language. A note has its translations in `properties.toma_note`. Opening a
// template puts one of them into the note and deletes the property, so that a saved workflow has a single text.
import { app } from "../../scripts/app.js"
import { pageLanguage } from "./texts.js"

export function translateNotes() {
  for (const node of (app.rootGraph ?? app.graph)?.nodes ?? []) {
    const translations = node.properties?.toma_note
    if (!translations) continue
    delete node.properties.toma_note
    const text = translations[pageLanguage()]
    if (text && node.widgets?.length) node.widgets[0].value = text
  }
}
