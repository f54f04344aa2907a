// load MathJax on pages with mathematics
if (document.querySelector(".math")) {
  window.MathJax = {
    loader: {load: ["input/asciimath", "output/svg"]},
    options: {ignoreHtmlClass: "md-container", processHtmlClass: "math"},
  };
  const script = document.createElement("script");
  script.src = new URL("mathjax/startup.js", document.currentScript.src);
  document.head.append(script);
}
