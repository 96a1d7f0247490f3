// Browsers start no worker for a page that was opened from a file. A hidden frame takes its place, so that search works there too.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.answer = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
      frame.srcdoc = `<script>self.postMessage = (data) => frameElement.answer(data)</script><script src="${url}"></script>`
      this.ready = new Promise((loaded) => frame.addEventListener("load", () => loaded(frame.contentWindow)))
      document.body.append(frame)
    }
    postMessage(data) {
      this.ready.then((worker) => worker.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
