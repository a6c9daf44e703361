/** The server's own description (openapi.json) as a page. */

const at = (id) => document.getElementById(id);

at("example").textContent = `curl ${new URL("v1/chat/completions", document.baseURI)} -H 'content-type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'`;

function element(tag, ...content) {
  const made = document.createElement(tag);
  made.append(...content);
  return made;
}

function link(id, text) {
  const made = element("a", text);
  made.href = `#${id}`;
  return made;
}

/** The type of a field: words, and links to the objects that it names. */
function typeOf(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return [link(`object-${name}`, name)];
  }
  const parts = schema.anyOf ?? schema.oneOf;
  if (parts) {
    const kinds = parts.filter((part) => part.type !== "null");
    return kinds.flatMap((part, i) => (i ? ["; or ", ...typeOf(part)] : typeOf(part)));
  }
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {}), bounds(schema.minItems, schema.maxItems, " of them")];
  const names = { string: "text", integer: "whole number", number: "number", boolean: "true or false", object: "object" };
  const size = bounds(schema.minLength, schema.maxLength, " characters");
  return [(names[schema.type] ?? "anything") + size + range(schema)];
}

function bounds(least, most, unit) {
  if (most !== undefined) return `, ${least ?? 0} to ${most}${unit}`;
  return least ? `, ${least} or more${unit}` : "";
}

function range(schema) {
  if (schema.minimum < Number.MIN_SAFE_INTEGER) return " of 64 bits";
  const low = schema.minimum !== undefined ? `from ${schema.minimum}` : schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : "";
  const high = schema.maximum !== undefined ? `to ${schema.maximum}` : schema.exclusiveMaximum !== undefined ? `below ${schema.exclusiveMaximum}` : "";
  return low || high ? `, ${[low, high].filter(Boolean).join(" ")}` : "";
}

function fields(schema, label) {
  const made = at("table").content.firstElementChild.cloneNode(true);
  made.setAttribute("aria-label", `Fields of ${label}`);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const what = element("td", ...typeOf(field));
    if (field.description) what.append(element("small", field.description));
    return element("tr", element("td", element("code", name)), what);
  });
  made.querySelector("tbody").replaceChildren(...rows);
  return made;
}

function part(id, heading, text) {
  const made = element("section", heading, ...(text ? [element("p", text)] : []));
  made.className = "card part";
  made.id = id;
  return made;
}

function operation(path, method, described) {
  const made = part(`${method}${path}`, element("h3", element("b", method.toUpperCase()), path), described.description);
  const list = element("dl");
  const asked = described.requestBody?.content["application/json"].schema;
  if (asked) list.append(element("dt", "body"), element("dd", ...typeOf(asked)));
  const fails = ([status]) => status >= 400;
  const answers = Object.entries(described.responses);
  for (const [status, answer] of [...answers.filter((entry) => !fails(entry)), ...answers.filter(fails).slice(0, 1)]) {
    const kinds = Object.entries(answer.content ?? {}).map(([kind, { schema }], i) => {
      const object = kind === "application/json" ? typeOf(schema) : [kind];
      return i ? [" or ", ...object] : object;
    });
    const label = status < 400 ? status : answers.filter(fails).map(([one]) => one).join(" ");
    list.append(element("dt", label), element("dd", ...kinds.flat()));
  }
  made.append(list);
  return made;
}

async function fetchDescription() {
  try {
    return await (await fetch(new URL("openapi.json", document.baseURI))).json();
  } catch {
    at("trouble").hidden = false;
    at("trouble").textContent = "No answer from the server. Is it still running?";
    return { paths: {}, components: { schemas: {} } };
  }
}

async function show() {
  const { paths, components } = await fetchDescription();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, described] of Object.entries(methods)) {
      at("contents").append(element("li", link(`${method}${path}`, path)));
      at("paths").append(operation(path, method, described));
    }
  }
  for (const [name, schema] of Object.entries(components.schemas)) {
    const made = part(`object-${name}`, element("h3", name), schema.description);
    made.append(fields(schema, name));
    at("objects").append(made);
  }
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

show();
