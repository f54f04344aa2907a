// A page that was opened from a folder cannot start a web worker; the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      url = new URL(url, location)
      this.frame = document.body.appendChild(document.createElement("iframe"))
      this.frame.hidden = true
      const inner = this.frame.contentWindow
      const load = (...urls) => urls.reduce((before, src) => before.then(() => new Promise(loaded => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src: new URL(src, url), onload: loaded })
        inner.document.body.appendChild(script)
      })), Promise.resolve())
      const post = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      inner.document.body || inner.document.appendChild(inner.document.createElement("body"))
      inner.importScripts = load
      inner.postMessage = post
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
