// Search runs in a web worker, which browsers refuse to pages that are opened from disk. There the
// worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.frame = frame.contentWindow;
      this.frame.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      this.started = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      this.started.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
