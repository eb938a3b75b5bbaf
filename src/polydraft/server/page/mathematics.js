// Formulas of an answer as MathML: $a$, \(a\), $$a$$, \[a\] and numbered environments. KaTeX is loaded with the first of them.

import { make } from './dom.js';

const BLOCKS = [
  /^ {0,3}\$\$((?:(?!\n\s*\n)[^])+?)\$\$[ \t]*(?:\n+|$)/,
  /^ {0,3}\\\[([^]+?)\\\][ \t]*(?:\n+|$)/,
  /^ {0,3}(\\begin\{(equation|align|alignat|gather)\*?\}[^]+?\\end\{\2\*?\})[ \t]*(?:\n+|$)/,
];
const DISPLAYED = [/^\$\$([^$]+)\$\$/, /^\\\[([^]+?)\\\]/];
// A dollar sign before a blank, behind one, or before a letter or digit encloses nothing: "$5 and $10".
const IN_LINES = [/^\\\(([^]+?)\\\)/, /^\$(?![\s$])((?:\\[^]|[^\\$])+?)(?<!\s)\$(?!\w)/];

function reader(patterns, display) {
  return (text) => {
    const match = patterns.map((pattern) => pattern.exec(text)).find(Boolean);
    return match && { type: 'formula', raw: match[0], tex: match[1], display };
  };
}

// Where a block begins in this paragraph; what is behind it is asked for later.
function blockBegins(text) {
  const end = text.indexOf('\n\n');
  return (end < 0 ? text : text.slice(0, end)).search(/(?<![^\n]) {0,3}(?:\$\$|\\\[|\\begin\{)/);
}

// For marked's lexer: where a formula may begin, and what it is.
export const FORMULAS = {
  block: [reader(BLOCKS, true)],
  startBlock: [blockBegins],
  inline: [reader(DISPLAYED, true), reader(IN_LINES, false)],
  startInline: [(text) => text.search(/(?<![\w\\])\$|\\[([]/)],
  childTokens: {},
};

let katex = null, loading = null;
const drawn = new Map(); // each formula once: an answer is drawn anew with every token

// KaTeX is asked for once, and again where the server was away.
export function load() {
  loading ??= import('./vendor/katex.js').then(() => { katex = globalThis.katex; }, () => { loading = null; });
  return loading;
}

// part: a formula that the lexer found.  write: puts its source into a node, which stays where KaTeX cannot read it.
export function formula(part, write) {
  const box = make('span', part.display ? 'formula display' : 'formula');
  box.title = part.raw.trim();
  if (!katex || !draw(box, part)) write(box);
  if (!katex) load().then(() => katex && draw(box, part));
  return box;
}

function draw(box, { tex, display }) {
  const key = `${display} ${tex}`;
  if (!drawn.has(key)) drawn.set(key, mathml(tex, display));
  const found = drawn.get(key);
  if (found) box.replaceChildren(found.cloneNode(true));
  return found;
}

function mathml(tex, display) {
  const box = make('span');
  try {
    katex.render(tex, box, { output: 'mathml', displayMode: display, maxSize: 20 });
    return spelt(box.querySelector('math'));
  } catch (error) {
    if (!(error instanceof katex.ParseError)) throw error;
    return null;
  }
}

// Browsers know alphabets as characters alone, not as `mathvariant`: the first capital and small letter, and the letters that stand elsewhere.
const ALPHABETS = {
  'double-struck': [0x1d538, 0x1d552, { C: 'ℂ', H: 'ℍ', N: 'ℕ', P: 'ℙ', Q: 'ℚ', R: 'ℝ', Z: 'ℤ' }],
  script: [0x1d49c, 0x1d4b6, { B: 'ℬ', E: 'ℰ', F: 'ℱ', H: 'ℋ', I: 'ℐ', L: 'ℒ', M: 'ℳ', R: 'ℛ', e: 'ℯ', g: 'ℊ', o: 'ℴ' }],
  fraktur: [0x1d504, 0x1d51e, { C: 'ℭ', H: 'ℌ', I: 'ℑ', R: 'ℜ', Z: 'ℨ' }],
};

function letter(character, [capital, small, elsewhere]) {
  if (character in elsewhere) return elsewhere[character];
  const first = /[A-Z]/.test(character) ? capital - 65 : small - 97;
  return /[A-Za-z]/.test(character) ? String.fromCodePoint(first + character.charCodeAt()) : character;
}

// What KaTeX leaves to its own fonts.
function spelt(math) {
  for (const node of math.querySelectorAll('[mathvariant]')) {
    const alphabet = ALPHABETS[node.getAttribute('mathvariant')];
    if (alphabet) node.textContent = [...node.textContent].map((character) => letter(character, alphabet)).join('');
  }
  for (const node of math.querySelectorAll('mo')) {
    if (node.textContent === '\u2061' && node.nextSibling?.textContent !== '(') node.setAttribute('rspace', '0.17em'); // log x
    if (node.textContent === '\u20d7') node.textContent = '→'; // the combining arrow of a vector
  }
  return math;
}
