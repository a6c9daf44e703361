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
    return kinds.flatMap((part, i) => (i ? [" or ", ...typeOf(part)] : typeOf(part)));
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
  const low = schema.minimum !== undefined ? `from ${schema.minimum}` : schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : "";
  const high = schema.maximum !== undefined ? `to ${schema.maximum}` : schema.exclusiveMaximum !== undefined ? `below ${schema.exclusiveMaximum}` : "";
  return low || high ? `, ${[low, high].filter(Boolean).join(" ")}` : "";
}

function fields(schema, label) {
  const made = at("table").content.firstElementChild.cloneNode(true);
  made.tabIndex = 0;
  made.setAttribute("role", "region");
  made.setAttribute("aria-label", `Fields of ${label}`);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const needed = schema.required?.includes(name);
    const given = field.default === undefined || field.default === null ? "" : JSON.stringify(field.default);
    const kind = element("td", ...typeOf(field));
    return element("tr", element("td", element("code", name)), kind, element("td", needed ? "needed" : given), element("td", field.description ?? ""));
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
  for (const [status, answer] of Object.entries(described.responses)) {
    const kinds = Object.entries(answer.content ?? {}).map(([kind, { schema }], i) => {
      const object = kind === "application/json" ? typeOf(schema) : [kind];
      return i ? [" or ", ...object] : object;
    });
    list.append(element("dt", status), element("dd", ...kinds.flat()));
  }
  made.append(list);
  return made;
}

async function show() {
  const answer = await fetch(new URL("openapi.json", document.baseURI));
  const { paths, components } = await answer.json();
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

show().catch(() => {
  at("trouble").hidden = false;
  at("trouble").textContent = "No answer from the server. Is it still running?";
});
