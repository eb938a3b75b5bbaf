// Markdown as DOM nodes, and each character as its token's span: no markup is ever made of what a model writes.
// `marked` finds the structure; every piece has its place in the source, and so the tokens that wrote it.

import { copies, make } from './dom.js';
import { highlighted } from './highlight.js';
import { FORMULAS, formula } from './mathematics.js';
import { Lexer, getDefaults } from './vendor/marked.js';

const MARKS = { strong: 'strong', em: 'em', del: 's' };
const FORMULA_MARK = /^\\[()[\]]$/; // of a formula that has no end yet
const OPTIONS = { ...getDefaults(), extensions: FORMULAS };

// tokens: of the answer, each { start, end, span } where span() makes an empty node for a piece of it.
export function render(text, tokens) {
  const page = document.createDocumentFragment(), pieces = coloured(text, tokens);
  blocks(page, Lexer.lex(text, OPTIONS), { at: 0, text, pieces });
  return page;
}

// The text from `start` to `end`, a span for each token of it.
export function coloured(text, tokens) {
  return (on, start, end) => {
    let low = 0, high = tokens.length;
    while (low < high) { const middle = (low + high) >> 1; if (tokens[middle].end <= start) low = middle + 1; else high = middle; }
    for (let at = start; at < end; low++) {
      const token = tokens[low], until = Math.min(token?.end ?? end, end), span = token?.span() ?? make('span');
      span.textContent = text.slice(at, until);
      on.append(span);
      at = until;
    }
  };
}

// The characters of `words`, which stand somewhere behind the place, line by line where the source indents them; what it does not have gets no tokens.
function write(on, words, place) {
  const start = place.text.indexOf(words, place.at);
  if (start < 0 && words.includes('\n')) { words.split(/(?<=\n)/).forEach((line) => write(on, line, place)); return; }
  if (start < 0 || !words) { on.append(words); return; }
  place.pieces(on, start, start + words.length);
  place.at = start + words.length;
}

function blocks(on, parts, place) {
  for (const part of parts) {
    const begin = place.text.indexOf(part.raw, place.at), end = begin < 0 ? place.at : begin + part.raw.length;
    if (begin >= 0) place.at = begin;
    block(on, part, place);
    place.at = Math.max(place.at, end);
  }
}

function block(on, part, place) {
  if (part.type === 'space' || part.type === 'def') return;
  if (part.type === 'code') { on.append(code(part, place)); return; }
  if (part.type === 'formula') { on.append(formula(part, (box) => write(box, part.raw.trimEnd(), place))); return; }
  if (part.type === 'hr') { on.append(make('hr')); return; }
  if (part.type === 'list') { on.append(list(part, place)); return; }
  if (part.type === 'table') { on.append(table(part, place)); return; }
  const tag = { heading: `h${Math.min((part.depth ?? 1) + 2, 6)}`, paragraph: 'p', blockquote: 'blockquote' }[part.type];
  const box = tag ? make(tag) : on;
  if (part.type === 'blockquote') blocks(box, part.tokens, place);
  else if (part.tokens) inline(box, part.tokens, place);
  else write(box, part.raw, place);
  if (tag) on.append(box);
}

function code(part, place) {
  const box = make('figure', 'code'), head = make('figcaption'), body = make('pre'), lines = body.appendChild(make('code'));
  head.append(part.lang || 'text', copies(() => part.text));
  if (/^[`~]{3}/.test(part.raw.trimStart())) place.at += part.raw.indexOf('\n') + 1;
  for (const [kind, words] of highlighted(part.text, part.lang)) write(kind ? lines.appendChild(make('span', kind)) : lines, words, place);
  box.append(head, body);
  return box;
}

function list(part, place) {
  const box = make(part.ordered ? 'ol' : 'ul');
  if (part.ordered && part.start > 1) box.start = part.start;
  for (const item of part.items) {
    const begin = place.text.indexOf(item.raw, place.at);
    if (begin >= 0) place.at = begin;
    const line = box.appendChild(make('li'));
    if (item.task) line.append(item.checked ? '☑ ' : '☐ ');
    blocks(line, item.tokens.filter((token) => token.type !== 'checkbox'), place);
  }
  return box;
}

function table(part, place) {
  const box = make('table'), row = (cells, tag) => {
    const line = make('tr');
    for (const cell of cells) inline(line.appendChild(make(tag, cell.align ?? '')), cell.tokens, place);
    return line;
  };
  box.append(row(part.header, 'th'), ...part.rows.map((cells) => row(cells, 'td')));
  return box;
}

function inline(on, parts, place) {
  for (const part of parts) {
    if (part.type in MARKS) inline(on.appendChild(make(MARKS[part.type])), part.tokens, place);
    else if (part.type === 'codespan') write(on.appendChild(make('code')), part.text, place);
    else if (part.type === 'br') on.append(make('br'));
    else if (part.type === 'link') link(on, part, place);
    else if (part.type === 'formula') enclose(on, part, place);
    else if (part.tokens?.length) inline(on, part.tokens, place);
    else write(on, part.type === 'text' || (part.type === 'escape' && !FORMULA_MARK.test(part.raw)) ? part.text : part.raw, place);
  }
}

function enclose(on, part, place) {
  const begin = place.text.indexOf(part.raw, place.at), end = begin < 0 ? place.at : begin + part.raw.length;
  on.append(formula(part, (box) => write(box, part.raw, place)));
  place.at = end;
}

// Links lead away only where they are web addresses, in a window of their own.
function link(on, part, place) {
  const web = /^https?:\/\//i.test(part.href), box = on.appendChild(make(web ? 'a' : 'span'));
  if (web) { box.href = part.href; box.target = '_blank'; box.rel = 'noopener noreferrer'; }
  inline(box, part.tokens, place);
}
