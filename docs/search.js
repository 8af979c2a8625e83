// In a search, "-word" means "without word". Readers also search for options such as --resume.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (typeof message?.data === "string") message = { ...message, data: message.data.replace(/(^|\s)--(?=\w)/g, "$1") };
  return post.call(this, message, ...rest);
};
