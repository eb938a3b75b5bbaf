// Colours of code: comments, strings, numbers, keywords and names that are called. An unknown language has none.

const STRING = /"(?:\\[^]|[^"\\\n])*"?|'(?:\\[^]|[^'\\\n])*'?/;
const PYTHON_STRING = new RegExp(`[rbfu]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRING.source})`, 'i');
const SCRIPT_STRING = new RegExp(`${STRING.source}|\`(?:\\\\[^]|[^\`\\\\])*\`?`);
const HASH = /#[^\n]*/;
const SLASHES = /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/;
const NUMBER = /\b(?:0[xob][\da-f_]+|\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?)\w*/i;
const CALLED = /\b[A-Za-z_]\w*(?=\()/;

const words = (text, flags) => new RegExp(`\\b(?:${text.replaceAll(' ', '|')})\\b`, flags);
const BRACES = 'break case catch class const continue default do else enum finally for if import new return static super switch this throw try void while true false null';

const LANGUAGES = {
  python: [HASH, PYTHON_STRING, words('and as assert async await break class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False self')],
  javascript: [SLASHES, SCRIPT_STRING, words(`${BRACES} async await delete export extends from function in instanceof interface let of type typeof undefined var yield`)],
  java: [SLASHES, STRING, words(`${BRACES} abstract as async await bool boolean byte char double extends final float fun func implements in int interface internal is let long namespace object override package private protected public short string struct using val var when where`)],
  c: [SLASHES, STRING, words(`${BRACES} auto bool char constexpr delete double explicit extern float friend int long namespace nullptr operator override private protected public short signed sizeof std struct template typedef typename union unsigned using virtual volatile`)],
  go: [SLASHES, SCRIPT_STRING, words('break case chan const continue default defer else for func go if import interface map nil package range return select struct switch type var true false')],
  rust: [SLASHES, /"(?:\\[^]|[^"\\])*"?|'(?:\\.|[^'\\\n])'/, words('as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while')],
  bash: [HASH, STRING, words('case do done elif else esac export fi for function if in local return set then until while')],
  ruby: [HASH, STRING, words('and begin break case class def do else elsif end ensure false for if in module next nil not or require rescue return self super then true unless until while yield')],
  sql: [/--[^\n]*|\/\*[^]*?(?:\*\/|$)/, STRING, words('add all alter and as asc begin between by case commit create cross delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer primary references right select set table then union unique update values view when where with', 'i')],
  settings: [HASH, STRING, words('true false null yes no')],
  json: [/(?!)/, STRING, words('true false null')],
  css: [/\/\*[^]*?(?:\*\/|$)/, STRING, /@[\w-]+|[\w-]+(?=\s*:[^{}]*[;}])/],
  markup: [/<!--[^]*?(?:-->|$)/, STRING, /<\/?[A-Za-z][\w:-]*|\/?>/],
};
const ALIASES = {
  python: 'py python3 pycon', javascript: 'js jsx ts tsx typescript mjs', java: 'kotlin kt scala swift cs csharp c# dart php', c: 'cpp c++ cc h hpp cuda objective-c',
  go: 'golang', rust: 'rs', bash: 'sh shell zsh console dockerfile makefile', ruby: 'rb', sql: 'sqlite postgresql mysql', settings: 'yaml yml toml ini',
  json: 'jsonc json5', css: 'scss less', markup: 'html xml svg vue',
};
const KINDS = ['comment', 'string', 'keyword', 'number', 'called'];
const PATTERNS = new Map(Object.entries(LANGUAGES).flatMap(([name, [comment, string, keyword]]) => {
  const kinds = [comment, string, keyword, NUMBER, CALLED];
  const flags = keyword.flags.includes('i') ? 'gi' : 'g';
  const pattern = new RegExp(kinds.map(({ source }) => `(${source})`).join('|'), flags);
  return [name, ...ALIASES[name].split(' ')].map((alias) => [alias, pattern]);
}));

// The code in pieces, each [its kind or '', its text]; together they are the code.
export function highlighted(code, language) {
  const pattern = PATTERNS.get(language?.trim().split(/[\s,{]/)[0].toLowerCase());
  if (!pattern) return [['', code]];
  const pieces = [];
  let end = 0;
  for (const match of code.matchAll(pattern)) {
    if (match.index > end) pieces.push(['', code.slice(end, match.index)]);
    pieces.push([KINDS[match.slice(1).findIndex((group) => group !== undefined)], match[0]]);
    end = match.index + match[0].length;
  }
  if (end < code.length) pieces.push(['', code.slice(end)]);
  return pieces;
}
