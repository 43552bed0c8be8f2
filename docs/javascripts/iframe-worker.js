// A page that was opened from a disk may not start a worker, and search runs in one. There it runs in a hidden frame
// instead. The theme asks for this class by its name.
"use strict";

class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    frame.title = "search";
    document.body.append(frame);
    this.frame = frame.contentWindow;
    this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = frame.contentDocument.createElement("script");
    script.src = url;
    this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
    frame.contentDocument.body.append(script);
  }

  postMessage(data) {
    this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.frameElement.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
