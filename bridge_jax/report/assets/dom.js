// Elements without markup: what comes from data is only ever a text node, an attribute's value or a number of pixels.
"use strict";

// element("p.dim", {title: "..."}, "text", child): the first argument is a tag with classes.
function element(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// Foreign text in a line of ours: <bdi> keeps its direction, and marks that turn it, to itself.
function foreign(text) {
  return element("bdi", {}, text);
}

function byId(id) {
  return document.getElementById(id);
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}
