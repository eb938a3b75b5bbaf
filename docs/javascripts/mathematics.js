// Formulas become MathML in the reader's browser, by the KaTeX that lies beside this file: no other host is asked.
for (const formula of document.querySelectorAll(".arithmatex")) {
  const [, opening, tex] = formula.textContent.match(/^\s*(\\[([])([\s\S]*)\\[)\]]\s*$/);
  katex.render(tex, formula, { output: "mathml", displayMode: opening === "\\[", throwOnError: false });
}
